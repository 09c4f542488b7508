"""How long a rank takes from its start to its first step, with torch's compiler front end and without it, in turns.

Both sides are interpreters of their own that import torch, make an optimizer and train one step of a small layer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.report import Row

ROUNDS = 7

PROGRAM = """
import torch
from pytest_mlhpc.node.worker import main as rank
{install}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def run() -> list[Row]:
    """Return the medians of both and their ratio."""
    sides = {"with": PROGRAM.format(install=""), "without": PROGRAM.format(install="rank.install({})")}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, text in sides.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], check=True)
            seconds[name].append(time.perf_counter() - began)
    with_it, without = (statistics.median(values) for values in seconds.values())
    return [
        Row(
            "first step of a rank, torch's compiler imported by the optimizer", "-", f"{with_it:.2f} s", None
        ),
        Row("... with the stand-in of runs that compile nothing", "-", f"{without:.2f} s", None),
        Row("ratio", "<= 0.6", f"{without / with_it:.2f}", without / with_it <= 0.6),
    ]
