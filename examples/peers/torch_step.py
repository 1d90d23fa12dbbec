"""PyTorch's DistributedDataParallel over gloo, for `bench step --torch`.

usage: torch_step.py LAYERS BATCH RANKS        such as 784,1024,1024,10 128 2

One process a rank, one thread each; the model, rows and optimizer of `bench step`: linear layers
with ReLU between, cross-entropy, SGD with momentum 0.9. Says `ready`; then for each line `run K`
all ranks take one step that does not count and K that do, and `seconds S` is the time of those K on
the slowest rank. Between two lines every process sleeps.
"""

import os
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel


def perceptron(widths):
    torch.manual_seed(7)
    chain = []
    for fan_in, fan_out in pairwise(widths):
        chain += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*chain[:-1])


def rank_main(rank, ranks, widths, batch, store, orders, others):
    # Copies that the fork made: with them open, the end of the one who asks would not be seen.
    for end in others:
        end.close()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    model = DistributedDataParallel(perceptron(widths))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    random = torch.Generator().manual_seed(8 + rank)
    features = torch.rand(batch, widths[0], generator=random) * 2 - 1
    targets = torch.arange(batch) % widths[-1]

    def step():
        optimizer.zero_grad()
        criterion(model(features), targets).backward()
        optimizer.step()

    orders.send("ready")
    try:
        while True:
            steps = orders.recv()
            step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            orders.send(time.perf_counter() - start)
    except EOFError:
        dist.destroy_process_group()


def main():
    widths = [int(width) for width in sys.argv[1].split(",")]
    batch, ranks = int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = processes.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (rank, ranks, widths, batch, f"{folder}/store", there, [*ends, here])
            workers.append(context.Process(target=rank_main, args=arguments, daemon=True))
            workers[-1].start()
            # The child's end lives on in the child alone: if it dies, `recv` says so.
            there.close()
            ends.append(here)
        for end in ends:
            end.recv()
        print("ready", flush=True)
        for line in sys.stdin:
            word, _, count = line.strip().partition(" ")
            if word != "run":
                sys.exit(f'"{line.strip()}" is no order; "run K" is')
            for end in ends:
                end.send(int(count))
            print("seconds", max(end.recv() for end in ends), flush=True)
        for end in ends:
            end.close()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
