"""Records of runs to a quality target, made by hand in the form in which the worker tells them."""

import dataclasses
import json
from pathlib import Path

import worlds

from pytest_mlhpc.node.protocol.schema import MetricValue, RunEvent
from pytest_mlhpc.store.definition import text_of

SECOND = 1_000_000_000
#: When the first run begins, ns UTC.
BEGUN = 1_800_000_000 * SECOND

#: What a run says of itself before its clock starts, and its parameters.
_SETTINGS = json.loads(Path(__file__).with_name("trained_runs.json").read_text(encoding="utf-8"))
FACTS = _SETTINGS["facts"]
PARAMETERS = _SETTINGS["parameters"]
#: Sample counts of the reference data sets; target; word of the quality; a quality that reaches it, and one that does not.
COUNTS = {"cosmoflow": (524_288, 65_536), "deepcam": (121_266, 15_158)}
TARGETS = {"cosmoflow": 0.124, "deepcam": 0.82}
WORDS = {"cosmoflow": "eval_error", "deepcam": "eval_accuracy"}
GOOD = {"cosmoflow": 0.12, "deepcam": 0.83}
BAD = {"cosmoflow": 0.3, "deepcam": 0.5}
#: Sample counts of a training that is short enough to be repeated at many scales.
SAMPLES, EVALUATED = 1024, 64


def events(
    workload="cosmoflow",
    *,
    epochs=3,
    epoch_s=10.0,
    eval_s=2.0,
    staging_s=5.0,
    reached=True,
    counts=None,
    facts=None,
):
    """Return what such a run tells; evaluations lie behind the training epochs."""
    train, evaluated = counts or COUNTS[workload]
    now = BEGUN
    found = [RunEvent("init_start", now)]
    told = {"train_samples": train, "eval_samples": evaluated, "quality_target": TARGETS[workload]}
    told |= FACTS[workload] if facts is None else facts
    found += [RunEvent(key, now, value) for key, value in told.items()]
    now += SECOND
    found += [RunEvent("init_stop", now), RunEvent("run_start", now), RunEvent("staging_start", now)]
    now += int(staging_s * SECOND)
    found.append(RunEvent("staging_stop", now))
    for epoch in range(1, epochs + 1):
        at = {"epoch_num": epoch}
        found.append(RunEvent("epoch_start", now, None, at))
        now += int(epoch_s * SECOND)
        found += [RunEvent("epoch_stop", now, None, at), RunEvent("eval_start", now, None, at)]
        now += int(eval_s * SECOND)
        good = reached and epoch == epochs
        quality = GOOD[workload] if good else BAD[workload]
        found += [RunEvent(WORDS[workload], now, quality, at), RunEvent("eval_stop", now, None, at)]
    found.append(RunEvent("run_stop", now, None, {"status": "success" if reached else "aborted"}))
    return tuple(found)


def with_value(key, value):
    """Return what a run tells that gives *value* wherever it tells *key*."""
    return tuple(dataclasses.replace(one, value=value) if one.key == key else one for one in events())


def record(
    number=1,
    workload="cosmoflow",
    *,
    devices=2,
    nodes=1,
    parameters=None,
    told=None,
    data_kind="real",
    cache="cold",
    name="test_quality",
    verdict="passed",
    device_type="cuda",
    software=None,
    communication=None,
    **changes,
):
    """Return the record of one run, of whose step so large a share is *communication*; *changes* are of the record, all else of its measurement."""
    chosen = {**PARAMETERS[workload], **(parameters or {})}
    told = events(workload) if told is None else told
    epochs = sum(event.key == "epoch_stop" for event in told)
    hosts = tuple(f"n{at + 1}" for at in range(nodes))
    of_ranks = [{"host": hosts[at * nodes // devices], "device_type": device_type} for at in range(devices)]
    of_ranks[0]["events"] = told
    measured = {
        "workload": workload, "nodes": hosts, "ranks": devices, "devices": devices, "device_type": device_type,
        "data_kind": data_kind, "data_source": "files", "cache": cache, "environment": software or {},
        "more": (MetricValue("epochs", float(epochs), "1", "lower"), *_waits(communication)),
        "per_rank": tuple(worlds.rank(at, **fields) for at, fields in enumerate(of_ranks)),
    }  # fmt: skip
    computed = {field: value for field, value in chosen.items() if value is not None}
    computed |= {"data": "synthetic", "devices": devices, "nodes": nodes, "preset": "reference"}
    fields = {
        "benchmark": name,
        "definition": text_of(workload, computed),
        "parameters": chosen,
        "asked": {},
        "verdict": verdict,
        "measurement": worlds.measurement(**measured),
        "judged": (),
        "created_ns": BEGUN + number * 3600 * SECOND,
    }
    return worlds.record(number, **{**fields, **changes})


def _waits(share):
    if share is None:
        return ()
    return (
        MetricValue("step_time", 0.2, "s", "lower"),
        MetricValue("exposed_communication_time", share * 0.2, "s", "lower"),
    )


def run_at(number, devices, batch=32, *, epochs=4, epoch_s=None, reached=True, parameters=None, **changes):
    """Return the record of a short training at one scale, whose steps take longer with a larger share of the batch."""
    took = epoch_s or SAMPLES / batch * (0.01 + 0.001 * batch / devices)
    told = events(epochs=epochs, epoch_s=took, eval_s=1.0, counts=(SAMPLES, EVALUATED), reached=reached)
    fields = {"devices": devices, "data_kind": "synthetic", "told": told, **changes}
    return record(number, parameters={"global_batch": batch, **(parameters or {})}, **fields)


def sweep():
    """Return runs on 1, 2 and 4 devices at three batches; with more devices a larger share is communication."""
    scales = [(devices, batch) for devices in (1, 2, 4) for batch in (8, 16, 32)]
    return [
        run_at(
            number,
            devices,
            batch,
            epochs=2 + batch // 8,
            communication=None if devices == 1 else devices / batch,
        )
        for number, (devices, batch) in enumerate(scales, 1)
    ]
