#!/bin/sh
# A program that `bench step` cannot have in its table; it stands for torch_step.py in a test.
# Arguments: the script's name, layers, batch, ranks, optimizer, way.
echo "cannot train $5 by $6, being a test"
