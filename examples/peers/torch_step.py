"""PyTorch's data-parallel training over gloo, for `bench step --torch`.

usage: torch_step.py LAYERS BATCH RANKS OPTIMIZER WAY     such as 784,1024,1024,10 128 2 adam zro

ways: ddp      DistributedDataParallel
      zro      the same, its optimizer in a ZeroRedundancyOptimizer
      fsdp2    `fully_shard` on each layer, and on the model

One process a rank, one thread each; the model, rows and optimizer of `bench step`: linear layers
with ReLU between, cross-entropy, SGD with momentum 0.9 (`momentum`) or `adam`. All ranks take one
step to begin with. Says `ready OPTIMIZER`, or `cannot WHY` if this PyTorch has not what the way
takes; then for each line `run K` all ranks take one step that does not count and K that do, and
`seconds S` is the time of those K on the slowest rank. Between two lines every process sleeps.
"""

import os
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from multiprocessing import connection

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.001}),
}


def perceptron(widths):
    torch.manual_seed(7)
    chain = []
    for fan_in, fan_out in pairwise(widths):
        chain += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*chain[:-1])


def ddp(model, make, constants):
    model = DistributedDataParallel(model)
    return model, make(model.parameters(), **constants)


def zro(model, make, constants):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), make, **constants)


def fsdp2(model, make, constants):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make(model.parameters(), **constants)


WAYS = {"ddp": ddp, "zro": zro, "fsdp2": fsdp2}


def rank_main(rank, ranks, widths, batch, kind, way, store, orders, others):
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
    criterion = torch.nn.CrossEntropyLoss()
    random = torch.Generator().manual_seed(8 + rank)
    features = torch.rand(batch, widths[0], generator=random) * 2 - 1
    targets = torch.arange(batch) % widths[-1]

    def step():
        optimizer.zero_grad()
        criterion(model(features), targets).backward()
        optimizer.step()

    try:
        model, optimizer = WAYS[way](perceptron(widths), *OPTIMIZERS[kind])
        step()
    except Exception as error:
        words = " ".join(str(error).split())
        orders.send(f"cannot {type(error).__name__} in PyTorch {torch.__version__}: {words[:200]}")
        return
    orders.send(f"ready {kind}")
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


def begun(ends):
    """The first answer that is not `ready`, before ranks that wait in vain, or that of all."""
    waiting = list(ends)
    while waiting:
        for end in connection.wait(waiting):
            answer = end.recv()
            if answer.startswith("cannot"):
                return answer
            waiting.remove(end)
    return answer


def main():
    _, widths, batch, ranks, kind, way = sys.argv
    widths = [int(width) for width in widths.split(",")]
    batch, ranks = int(batch), int(ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = processes.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            others = [*ends, here]
            arguments = (rank, ranks, widths, batch, kind, way, f"{folder}/store", there, others)
            workers.append(context.Process(target=rank_main, args=arguments, daemon=True))
            workers[-1].start()
            # The child's end lives on in the child alone: if it dies, `recv` says so.
            there.close()
            ends.append(here)
        answer = begun(ends)
        print(answer, flush=True)
        if answer.startswith("cannot"):
            # The others may wait for a rank that has gone; they end with this process.
            return
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
