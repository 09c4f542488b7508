"""Bagging against as many bare runs: M base models of one rank each, and M trainings that know nothing of each other.

Both sides train the same workload with the same batch, steps and threads on the same cores; M processes at a time that
begin their timed windows together, and count the samples of all over the time of the slowest. They take turns, first one
ahead, then the other, so that what else the machine does hits both; each pair gives one ratio, of which the median counts.
With more base models than cores, both sides share them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.report import Row
from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker import distributed, ensemble_rank, rank
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

WORKLOAD, MODELS = "cosmoflow", (1, 2, 4)
STEPS, WARMUP, BATCH = 24, 4, 8
PAIRS = 5
REACH = 0.95
LIMIT_S = 1800.0


def _plan(models: int) -> RunPlan:
    workload = next(one for one in WORKLOADS if one.name == WORKLOAD)
    more = {"bagging": [models, 1]} if models else {}
    parameters = {**parameters_of(workload, "smoke"), "global_batch": BATCH * max(1, models), **more}
    return RunPlan(
        run_id="bagging", nonce="", attempt=0, workload=WORKLOAD, parameters=parameters, nodes=1, ranks=max(1, models),
        cores_per_rank=1, device_type="cpu", launcher="plain", time_limit_s=LIMIT_S, steps=STEPS, warmup_steps=WARMUP,
    )  # fmt: skip


def one(models: int, number: int, folder: str) -> None:
    """Be one rank of an ensemble of *models*, or for 0 a bare run, and print samples and seconds."""
    torch.set_num_threads(1)
    accelerator = open_device("cpu", number)
    run = _plan(models)
    if models:
        group = Group(number, number, models)
        distributed.join(group, accelerator, LIMIT_S)
        report = ensemble_rank.measure(run, group, accelerator, Path(folder), lambda *_: None)
    else:
        report = rank.train(run, Group(), accelerator, Path(folder), lambda *_: None, begin=_begin).report
    sys.stdout.write(f"\n{json.dumps([report.samples, report.epoch_s])}\n")
    sys.stdout.flush()
    os._exit(0)  # as a rank does


def _begin() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def _throughput(models: int, count: int) -> float:
    """Return samples per second of *count* processes: an ensemble of *models*, or for 0 bare runs."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(count):
            code = f"from benchmarks import bagging; bagging.one({models}, {number}, {folder!r})"
            variables = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count),
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nodes.free_port()), "OMP_NUM_THREADS": "1"}  # fmt: skip
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    env={**os.environ, **variables},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        if not models:
            _let_begin(started)
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return sum(samples for samples, _ in told) / max(seconds for _, seconds in told)


def _let_begin(started: list[subprocess.Popen[str]]) -> None:
    """Wait until all are warm, then let all begin."""
    for process in started:
        while process.stdout is not None and process.stdout.readline() not in {"ready\n", ""}:
            pass
    for process in started:
        if process.stdin is not None:
            process.stdin.write("go\n")
            process.stdin.flush()


def run() -> list[Row]:
    """Measure each number of base models."""
    rows = []
    for models in MODELS:
        ratios = []
        for turn in range(PAIRS):
            first = _throughput(models, models) if turn % 2 else None
            bare = _throughput(0, models)
            ratios.append((first or _throughput(models, models)) / bare)
        middle = statistics.median(ratios)
        text = f"{middle:.3f} (median of {PAIRS} pairs, {min(ratios):.3f} to {max(ratios):.3f})"
        what = (
            f"{WORKLOAD}, bagging {models} x 1 over {models} bare run{'s' if models > 1 else ''} side by side"
        )
        rows.append(Row(what, f">= {REACH}", text, middle >= REACH))
    return rows
