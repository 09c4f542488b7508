"""A small real training that is limited in a way that it is told: python screened_training.py HOW STEPS."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    """Random samples, each of which takes *seconds* to get."""

    def __init__(self, seconds, width):
        self.seconds, self.width = seconds, width

    def __len__(self):
        return 1_000_000

    def __getitem__(self, place):
        time.sleep(self.seconds)
        return torch.randn(self.width), 0


def main(how, steps):
    torch.set_num_threads(1)
    width = 1024 if how == "computing" else 32
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = 1 if how == "workers" else 0
    loader = DataLoader(
        Samples(0.02 if how in ("data", "workers") else 0.0, width), batch_size=8, num_workers=workers
    )
    kept = []
    for step, batch in enumerate(loader):
        if how == "slow_rank" and rank == 1:
            time.sleep(0.3)
        inputs, targets = batch
        times = 64 if how == "computing" else 1
        loss = nn.functional.cross_entropy(model(inputs.repeat(times, 1)), targets.repeat(times))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "growing":
            kept.append(torch.ones(4 << 20, dtype=torch.uint8))  # 4 MiB that nobody lets go
            time.sleep(0.05)
        if step + 1 == steps:
            break
    if ranks > 1:
        torch.distributed.destroy_process_group()
    sys.stdout.write(f"trained {step + 1}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
