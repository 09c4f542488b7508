"""Train a small network with DistributedDataParallel on the CPU; print the rate of all ranks, write the losses."""

import json
import os
import sys
import time

import torch
from torch import distributed, nn

BATCH, STEPS = 64, 50

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
samples = torch.rand(BATCH, 256)
losses = []
for step in range(STEPS + 5):
    if step == 5:
        start = time.perf_counter()
    loss = nn.functional.mse_loss(model(samples), samples.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
seconds = time.perf_counter() - start
if distributed.get_rank() == 0:
    print(f"rate: {BATCH * STEPS * distributed.get_world_size() / seconds:.1f}")
    with open("m.json", "w") as file:
        json.dump({"first": losses[0], "last": losses[-1]}, file)
distributed.barrier()
sys.stdout.flush()
os._exit(
    0
)  # the threads of torch's gloo abort one in ten interpreters that end in the usual way (torch 2.13)
