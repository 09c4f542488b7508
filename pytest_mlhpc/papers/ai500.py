"""HPC AI500 (V3.0): FLOPS and VFLOPS of ensembles, bagging beside plain data parallelism, as figures, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import RecordedRun
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.text import one_line

OURS, THEIRS = "ours", "hpc-ai500"

#: Fields of a definition that may differ between an ensemble and the plain training that it is compared with.
_SCALE: Final = frozenset({"bagging", "parallel", "global_batch", *keys.SCALE, *keys.LENGTH})

_THROUGHPUT, _ACHIEVED = "effective_throughput", "achieved_flops"
_THEIR_COUNT, _QUALITY = "hpc_ai500_flop_per_sample", "ensemble_quality"


@dataclass(frozen=True)
class QualityGoal:
    """What a quality counts: its field of application, the target, and n, the exponent."""

    application: str
    target: float
    exponent: float


#: Workload -> its goal. Exponents: HPC AI500 V3.0 (image classification 5, extreme weather 10), which has none for other
#: fields. Targets: top-1 0.763 of its ResNet-50 (benchcouncil.org, ranking); DeepCAM's is MLPerf HPC's IoU 0.82, as the
#: paper's 0.35 is the average precision of another network, a Faster R-CNN.
GOALS: Final[Mapping[str, QualityGoal]] = {
    "resnet50": QualityGoal("image classification", 0.763, 5),
    "deepcam": QualityGoal("extreme weather", 0.82, 10),
}


@dataclass(frozen=True)
class Ensemble:
    """One benchmark with ``bagging=(models, each)``. FLOPS are FLOP/s; None where the runs cannot tell."""

    label: str
    models: int
    each: int
    throughput: float  #: samples/s
    runs: int
    failed: int  #: base models of the newest run
    flops: float | None
    quality: float
    base_quality: float
    better: str
    vflops: float | None
    why: str = ""  #: why there are no VFLOPS


@dataclass(frozen=True)
class EnsembleScale:
    """What was measured on so many devices: plain data parallelism, and ensembles by (M, P, shards of a base model); samples/s."""

    group: str
    devices: int
    plain: float | None
    bagging: Mapping[tuple[int, int, int], float]


def _shards(key: keys.Key) -> int:
    """Return over how many devices a model is spread, 1 where each has a replica."""
    try:
        asked = json.loads(key.identity.get("parallel", "null"))
    except ValueError:
        return 1
    found = asked.get("shard") if isinstance(asked, dict) else None
    return found if isinstance(found, int) else 1


def shape_of(key: keys.Key) -> tuple[int, int] | None:
    """Return (M, P) of a benchmark, None where it is no ensemble."""
    try:
        models, each = json.loads(key.identity.get("bagging", "null"))
    except (ValueError, TypeError):
        return None
    return (models, each) if isinstance(models, int) and isinstance(each, int) else None


def vflops(flops: float, quality: float, goal: QualityGoal, better: str) -> float:
    """Return *flops* weighed with the quality that was reached; nothing for a quality of nothing, infinity beyond floats."""
    over, under = (quality, goal.target) if better == "higher" else (goal.target, quality)
    if under <= 0:
        return float("inf") if over > 0 else 0.0
    try:
        return flops * math.pow(max(0.0, over / under), goal.exponent)
    except OverflowError:
        return float("inf")


def ensembles(
    runs: Mapping[Benchmark, Sequence[RecordedRun]],
    rule: str,
    target: float | None = None,
    exponent: float | None = None,
) -> list[Ensemble]:
    """Return the ensembles among benchmarks (benchmark -> accepted runs, newest first), by name and shape.

    *target* and *exponent* take the place of those of :data:`GOALS`.
    """
    found = []
    for benchmark, some in runs.items():
        key = keys.parse(benchmark)
        shape = shape_of(key) if key is not None else None
        if key is not None and shape is not None and _QUALITY in some[0].metrics:
            goal = _goal(key.workload, target, exponent)
            found.append(_ensemble(key, shape, some, rule, goal))
    return sorted(found, key=lambda one: (one.label, one.models * one.each, one.models))


def _goal(workload: str, target: float | None, exponent: float | None) -> QualityGoal | None:
    known = GOALS.get(workload)
    if known is None and (target is None or exponent is None):
        return None
    return QualityGoal(
        known.application if known else workload,
        known.target if target is None and known else target or 0.0,
        known.exponent if exponent is None and known else exponent or 0.0,
    )


def _ensemble(
    key: keys.Key, shape: tuple[int, int], runs: Sequence[RecordedRun], rule: str, goal: QualityGoal | None
) -> Ensemble:
    newest = runs[0].metrics
    quality, _, better = newest[_QUALITY]
    flops = _middle(runs, _ACHIEVED)
    throughput = _middle(runs, _THROUGHPUT) or 0.0
    if rule == THEIRS:
        count = newest.get(_THEIR_COUNT)
        flops = None if count is None else count[0] * throughput
    weighed = None if flops is None or goal is None else vflops(flops, quality, goal, better)
    if weighed is not None and not math.isfinite(weighed):
        weighed = None  # an error of nothing at all, or an exponent beyond floats
    return Ensemble(
        label=f"{key.name} preset={key.rest.get('preset', '-')}",
        models=shape[0],
        each=shape[1],
        throughput=throughput,
        runs=len(runs),
        failed=int(_of(newest, "base_models_failed")),
        flops=flops,
        quality=quality,
        base_quality=_of(newest, "base_model_quality"),
        better=better,
        vflops=weighed,
        why=""
        if goal is not None
        else f"{key.workload} has no exponent in HPC AI500: give --target and --exponent",
    )


def scaling(runs: Mapping[Benchmark, Sequence[RecordedRun]]) -> list[EnsembleScale]:
    """Return plain trainings and ensembles that differ in scale alone, beside each other by their devices.

    The batch of a device must be the same. A training of one model that is sharded is none of both. Groups without any ensemble are left out.
    """
    plain: dict[tuple[str, int], float] = {}
    bagging: dict[tuple[str, int], dict[tuple[int, int, int], float]] = {}
    for benchmark, some in runs.items():
        key, throughput = keys.parse(benchmark), _middle(some, _THROUGHPUT)
        if key is None or throughput is None:
            continue
        place = _group(key), some[0].devices
        shape = shape_of(key)
        if shape is not None:
            bagging.setdefault(place, {})[*shape, _shards(key)] = throughput
        elif "bagging" not in key.identity and _shards(key) == 1:
            plain[place] = max(throughput, plain.get(place, 0.0))
    groups = {group for group, _ in bagging}
    places = sorted(place for place in {*plain, *bagging} if place[0] in groups)
    return [
        EnsembleScale(*place, plain.get(place), dict(sorted(bagging.get(place, {}).items())))
        for place in places
    ]


def _group(key: keys.Key) -> str:
    """Return all that must be equal: fields that are no scale, and the batch of a device."""
    fields = {name: value for name, value in key.fields.items() if name not in _SCALE}
    try:
        fields["device_batch"] = f"{int(key.identity['global_batch']) / int(key.rest['devices']):g}"
    except (KeyError, ValueError, ZeroDivisionError):
        fields["global_batch"] = key.identity.get("global_batch", "")
    return f"{key.workload} " + " ".join(f"{name}={fields[name]}" for name in sorted(fields))


def _middle(runs: Sequence[RecordedRun], metric: str) -> float | None:
    values = [run.metrics[metric][0] for run in runs if metric in run.metrics]
    return statistics.median(values) if values else None


def _of(metrics: Mapping[str, tuple[float, str, str]], name: str) -> float:
    return metrics.get(name, (0.0, "", ""))[0]


#: Width of the columns of both tables behind the first; longer names in that one have a line of their own above their figures.
_WIDTH, _LONGEST = 12, 60


def text_of(machine: str, rule: str, found: Sequence[Ensemble], scales: Sequence[EnsembleScale]) -> str:
    """Return both tables for one machine."""
    lines = [f"{_whole(machine)}, FLOPS by the rule {rule}", ""]
    lines += _table(
        ["", "M x P", "samples/s", "FLOPS", "ensemble", "base models", "VFLOPS"],
        [
            [
                f"{_whole(one.label)} ({one.runs})",
                f"{one.models} x {one.each}",
                f"{one.throughput:.4g}",
                _flops(one.flops),
                f"{one.quality:.4g}",
                f"{one.base_quality:.4g}",
                _flops(one.vflops),
            ]
            for one in found
        ],
    )
    lines += [f"  {_whole(one.label)}: {one.why}" for one in found if one.why]
    lines += [
        f"  {_whole(one.label)}, {one.models} x {one.each}: {one.failed} of {one.models} base models failed, the rest counts"
        for one in found
        if one.failed
    ]
    for group in dict.fromkeys(scale.group for scale in scales):
        lines += ["", _whole(group), *_scaling([scale for scale in scales if scale.group == group])]
    return "\n".join(lines) + "\n"


def _scaling(scales: Sequence[EnsembleScale]) -> list[str]:
    """Return a row for each number of devices and shape; efficiency is against the smallest plain training's device."""
    first = next((scale for scale in scales if scale.plain), None)
    device = first.plain / first.devices if first is not None and first.plain else None

    def row(scale: EnsembleScale, how: str, throughput: float) -> list[str]:
        ratio = f"{throughput / scale.plain:.3g}" if scale.plain else "-"
        efficiency = f"{100 * throughput / scale.devices / device:.1f} %" if device else "-"
        return [how, str(scale.devices), f"{throughput:.4g}", efficiency, ratio]

    rows = []
    for scale in scales:
        if scale.plain is not None:
            rows.append(row(scale, "plain data parallelism", scale.plain))
        for (models, each, shards), throughput in scale.bagging.items():
            sharded = f", {shards} shards" if shards > 1 else ""
            rows.append(row(scale, f"bagging {models} x {each}{sharded}", throughput))
    return _table(["", "devices", "samples/s", "efficiency", "over plain"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    first = max((len(row[0]) for row in rows if len(row[0]) <= _LONGEST), default=0)
    lines = []
    for name, *cells in [head, *rows]:
        if len(name) > _LONGEST:
            lines.append(name)
        beside = "" if len(name) > _LONGEST else name
        lines.append((beside.ljust(first) + "".join(cell.rjust(_WIDTH) for cell in cells)).rstrip())
    return lines


def _whole(name: str) -> str:
    """Return a title or label safe to print: all of it, as its end is what tells it from others."""
    return one_line(name, None)


def _flops(value: float | None) -> str:
    if value is None:
        return "-"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g}"


def json_of(
    machine: str, rule: str, found: Sequence[Ensemble], scales: Sequence[EnsembleScale]
) -> dict[str, Any]:
    """Return the same as plain data. FLOPS in FLOP/s, throughput in samples/s."""
    return {
        "machine": machine,
        "rule": rule,
        "ensembles": [dataclasses.asdict(one) for one in found],
        "scaling": [
            {
                "group": scale.group,
                "devices": scale.devices,
                "plain": scale.plain,
                "bagging": [
                    {"models": m, "each": p, "shards": shards, "throughput": throughput}
                    for (m, p, shards), throughput in scale.bagging.items()
                ],
            }
            for scale in scales
        ],
    }
