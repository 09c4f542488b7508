"""Slows every optimiser step of one workload in the ranks of a run, from outside: on PYTHONPATH of the worker.

``MLHPC_BENCH_SLOW=language_model:0.15`` makes each step of that workload take 15 % longer.
"""

import json
import os
import time


def _slow_every_step(fraction: float) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415 - ranks alone pay for it

    last = time.perf_counter()

    def wait(*_: object) -> None:
        nonlocal last
        until = time.perf_counter()
        until += fraction * min(until - last, 1.0)  # a pause between warm-up and window is no step
        while time.perf_counter() < until:
            pass
        last = time.perf_counter()

    register_optimizer_step_post_hook(wait)


def _workload_of_this_rank() -> str:
    with open(os.environ["MLHPC_PLAN"], encoding="utf-8") as file:  # noqa: PTH123 - keeps start-up small
        runs = json.load(file)["runs"]
    return next(run["workload"] for run in runs if run["run_id"] == os.environ["MLHPC_RUN"])


if "MLHPC_BENCH_SLOW" in os.environ and "MLHPC_CHANNEL" in os.environ:
    workload, _, share = os.environ["MLHPC_BENCH_SLOW"].partition(":")
    if workload == _workload_of_this_rank():
        _slow_every_step(float(share))
