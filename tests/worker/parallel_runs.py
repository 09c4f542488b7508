"""Small runs that ranks share in every way, and what their reports say of all ranks together."""

from __future__ import annotations

from typing import Any

from probe_ranks import NAMED
from rank_helpers import run_plan

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.worker.workloads.catalogue import parameters_of

RANKS = 4
LAYOUTS = {"replicated": (4, 1), "sharded": (1, 4), "hybrid": (2, 2)}

#: name -> what each rank told, as JSON
Told = dict[str, list[dict[str, Any]]]


def shared(name: str, steps: int, **parameters: Any) -> RunPlan:
    """Return a run of four ranks of the smoke preset with *parameters*; one step of warm-up for each two that are timed."""
    return run_plan(
        workload=name,
        parameters=parameters_of(NAMED[name], "smoke", global_batch=8, **parameters),
        ranks=RANKS,
        launcher="torchrun",
        steps=steps,
        warmup_steps=steps // 2,
        variables={},
    )


def tiny(**changes: Any) -> RunPlan:
    """Return a run of a language model with blocks, and with weights that four ranks cannot share evenly."""
    shape = {"layers": 2, "hidden": 20, "heads": 2, "context": 8, "vocabulary": 257}
    return shared("language_model", 4, **{**shape, **changes})


def laid_out(layout: str, **changes: Any) -> RunPlan:
    """Return the tiny run with one of the :data:`LAYOUTS`."""
    replicate, shard = LAYOUTS[layout]
    return tiny(parallel={"replicate": replicate, "shard": shard}, **changes)


def losses(told: Told, name: str) -> list[float]:
    """Return the loss of each step, the mean over ranks."""
    return [sum(step) / RANKS for step in zip(*(report["losses"] for report in told[name]), strict=True)]


def sent(told: Told, name: str, what: str = "bytes") -> dict[str, float]:
    """Return kind of collective -> bytes (or count) of a step, which are the same on all ranks."""
    all_told = {
        tuple((figure["name"], figure["value"]) for figure in report["figures"]) for report in told[name]
    }
    (one,) = all_told
    return {key.removesuffix(f"_{what}"): value for key, value in one if key.endswith(what)}


def gradients(told: Told, name: str) -> int:
    """Return the bytes of all gradients, in fp32."""
    return 4 * int(told[name][0]["parameters"])
