"""Records of runs to a quality target, made by hand in the form in which the worker tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import worlds

from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.schema import Event, Metric

SECOND = 1_000_000_000
#: When the first run begins, ns UTC.
BEGUN = 1_800_000_000 * SECOND

#: What a run says of itself before its clock starts.
FACTS: Mapping[str, Mapping[str, Any]] = {
    "cosmoflow": {
        "opt_base_learning_rate": 0.001,
        "opt_learning_rate_warmup_epochs": 4,
        "opt_learning_rate_warmup_factor": 1.0,
        "opt_learning_rate_decay_boundary_epochs": [32, 64],
        "opt_learning_rate_decay_factor": [0.25, 0.125],
        "opt_weight_decay": 0.0,
        "opt_momentum": 0.9,
    },
    "deepcam": {
        "opt_lr": 0.001,
        "opt_betas": [0.9, 0.999],
        "opt_eps": 1e-6,
        "opt_weight_decay": 0.01,
        "scheduler_type": "multistep",
        "scheduler_lr_warmup_steps": 400,
        "scheduler_lr_warmup_factor": 1.0,
        "scheduler_milestones": [800],
        "scheduler_decay_rate": 0.1,
        "batchnorm_group_size": 1,
    },
}
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "cosmoflow": {
        "kernel_size": 3, "input_size": 128, "layers": 5, "base_channels": 32, "dropout": 0.5, "optimizer": "sgd",
        "global_batch": 32, "seed": 1, "gradient_accumulation": 1, "until": "quality",
    },
    "deepcam": {
        "height": 768, "width": 1152, "width_multiplier": 1.0, "middle_blocks": 16, "optimizer": "adamw",
        "global_batch": 32, "seed": 1, "gradient_accumulation": 1, "until": "quality",
    },
}  # fmt: skip
#: Sample counts of the reference data sets; target; word of the quality; a quality that reaches it, and one that does not.
COUNTS = {"cosmoflow": (524_288, 65_536), "deepcam": (121_266, 15_158)}
TARGETS = {"cosmoflow": 0.124, "deepcam": 0.82}
WORDS = {"cosmoflow": "eval_error", "deepcam": "eval_accuracy"}
GOOD = {"cosmoflow": 0.12, "deepcam": 0.83}
BAD = {"cosmoflow": 0.3, "deepcam": 0.5}


def events(
    workload: str = "cosmoflow",
    *,
    begun_ns: int = BEGUN,
    epochs: int = 3,
    epoch_s: float = 10.0,
    eval_s: float = 2.0,
    staging_s: float = 5.0,
    reached: bool = True,
    counts: tuple[int, int] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> tuple[Event, ...]:
    """Return what such a run tells; evaluations lie behind the training epochs."""
    train, evaluated = counts or COUNTS[workload]
    now = begun_ns
    found = [Event("init_start", now)]
    told = {"train_samples": train, "eval_samples": evaluated, "quality_target": TARGETS[workload]}
    told |= FACTS[workload] if facts is None else facts
    found += [Event(key, now, value) for key, value in told.items()]
    now += SECOND
    found += [Event("init_stop", now), Event("run_start", now), Event("staging_start", now)]
    now += int(staging_s * SECOND)
    found.append(Event("staging_stop", now))
    for epoch in range(1, epochs + 1):
        at = {"epoch_num": epoch}
        found.append(Event("epoch_start", now, None, at))
        now += int(epoch_s * SECOND)
        found += [Event("epoch_stop", now, None, at), Event("eval_start", now, None, at)]
        now += int(eval_s * SECOND)
        good = reached and epoch == epochs
        quality = GOOD[workload] if good else BAD[workload]
        found += [Event(WORDS[workload], now, quality, at), Event("eval_stop", now, None, at)]
    found.append(Event("run_stop", now, None, {"status": "success" if reached else "aborted"}))
    return tuple(found)


def record(
    number: int = 1,
    workload: str = "cosmoflow",
    *,
    devices: int = 2,
    nodes: int = 1,
    parameters: Mapping[str, Any] | None = None,
    told: tuple[Event, ...] | None = None,
    data_kind: str = "real",
    cache: str = "cold",
    name: str = "test_quality",
    verdict: str = "passed",
    device_type: str = "cuda",
    **changes: Any,
) -> Record:
    """Return the record of one run; *changes* are of the record, all else of its measurement."""
    chosen = {**PARAMETERS[workload], **(parameters or {})}
    told = events(workload) if told is None else told
    epochs = sum(event.key == "epoch_stop" for event in told)
    hosts = tuple(f"n{at + 1}" for at in range(nodes))
    ranks = [
        worlds.rank(
            at, host=hosts[at * nodes // devices], events=told if at == 0 else (), device_type=device_type
        )
        for at in range(devices)
    ]
    measurement = worlds.measurement(
        workload=workload,
        nodes=hosts,
        ranks=devices,
        devices=devices,
        device_type=device_type,
        data_kind=data_kind,
        data_source="files",
        cache=cache,
        more=(Metric("epochs", float(epochs), "1", "lower"),),
        per_rank=tuple(ranks),
    )
    fields: dict[str, Any] = {
        "benchmark": key_of(workload, chosen, devices, nodes, name),
        "parameters": chosen,
        "asked": {},
        "verdict": verdict,
        "measurement": measurement,
        "judged": (),
        "created_ns": BEGUN + number * 3600 * SECOND,
    }
    return worlds.record(number, **{**fields, **changes})


def key_of(workload: str, parameters: Mapping[str, Any], devices: int, nodes: int, name: str) -> str:
    """Return the key of such a run."""
    identity = " ".join(f"{field}={parameters[field]}" for field in sorted(parameters))
    return (
        f"{workload}[{identity}] data=synthetic devices={devices} name={name} nodes={nodes} preset=reference"
    )
