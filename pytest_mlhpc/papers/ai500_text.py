"""HPC AI500's report as text and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pytest_mlhpc.papers.ai500 import Ensemble, Scale
from pytest_mlhpc.store.text import one_line

#: Width of the columns of both tables behind the first; longer names in that one have a line of their own above their figures.
_WIDTH, _LONGEST = 12, 60


def text_of(machine: str, rule: str, found: Sequence[Ensemble], scales: Sequence[Scale]) -> str:
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


def _scaling(scales: Sequence[Scale]) -> list[str]:
    """Return a row for each number of devices and shape; efficiency is against the smallest plain training's device."""
    first = next((scale for scale in scales if scale.plain), None)
    device = first.plain / first.devices if first is not None and first.plain else None

    def row(scale: Scale, how: str, throughput: float) -> list[str]:
        ratio = f"{throughput / scale.plain:.3g}" if scale.plain else "-"
        efficiency = f"{100 * throughput / scale.devices / device:.1f} %" if device else "-"
        return [how, str(scale.devices), f"{throughput:.4g}", efficiency, ratio]

    rows = []
    for scale in scales:
        if scale.plain is not None:
            rows.append(row(scale, "plain data parallelism", scale.plain))
        rows += [row(scale, f"bagging {m} x {p}", throughput) for (m, p), throughput in scale.bagging.items()]
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


def json_of(machine: str, rule: str, found: Sequence[Ensemble], scales: Sequence[Scale]) -> dict[str, Any]:
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
                    {"models": m, "each": p, "throughput": throughput}
                    for (m, p), throughput in scale.bagging.items()
                ],
            }
            for scale in scales
        ],
    }
