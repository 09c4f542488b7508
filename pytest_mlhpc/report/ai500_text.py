"""HPC AI500's report as text and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pytest_mlhpc.report.ai500 import Ensemble, Scale
from pytest_mlhpc.results.text import one_line

#: Columns of both tables behind the first, and their width.
_WIDTH = 12


def text_of(machine: str, rule: str, found: Sequence[Ensemble], scales: Sequence[Scale]) -> str:
    """Return both tables for one machine."""
    lines = [f"{one_line(machine)}, FLOPS by the rule {rule}", ""]
    lines += _table(
        ["", "M x P", "samples/s", "FLOPS", "ensemble", "base models", "VFLOPS"],
        [
            [
                f"{one_line(one.label)} ({one.runs})",
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
    lines += [f"  {one_line(one.label)}: {one.why}" for one in found if one.why]
    lines += [
        f"  {one_line(one.label)}, {one.models} x {one.each}: {one.failed} of {one.models} base models failed, the rest counts"
        for one in found
        if one.failed
    ]
    for group in dict.fromkeys(scale.group for scale in scales):
        lines += ["", one_line(group), *_scaling([scale for scale in scales if scale.group == group])]
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
    first = max([len(row[0]) for row in rows], default=0)
    return [
        (row[0].ljust(first) + "".join(cell.rjust(_WIDTH) for cell in row[1:])).rstrip()
        for row in [head, *rows]
    ]


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
