"""Where the time goes: I/O, compute, communication, as shares of the training epoch (HPDC'24's terms). Pure."""

from __future__ import annotations

from pytest_mlhpc.report.html.model import Bench, Split

_NEEDED = ("epoch_time", "io_time")


def split_of(bench: Bench) -> Split | None:
    """Return the shares of each watched night that has the figures, or None where no night has.

    Communication is told for one step (``node/protocol/combine.py``), the epoch for all: its share is that of a median step
    (``exposed_communication_time / step_time``), never more than what I/O leaves. Compute is the rest.
    """
    figures = {row.metric: row.values for row in bench.rows}
    if not all(name in figures for name in _NEEDED):
        return None
    exposed, steps = figures.get("exposed_communication_time"), figures.get("step_time")
    nights, io, compute, communication = [], [], [], []
    told = False
    for place, counts in enumerate(bench.watched):
        epoch_s, io_s = figures["epoch_time"][place], figures["io_time"][place]
        if not counts or epoch_s is None or io_s is None or epoch_s <= 0 or io_s < 0:
            continue
        waits = min(io_s / epoch_s, 1.0)
        talks = 0.0
        exposed_s = exposed[place] if exposed else None
        step_s = steps[place] if steps else None
        if exposed_s is not None and step_s is not None and step_s > 0 and exposed_s >= 0:
            talks, told = min(exposed_s / step_s, 1.0 - waits), True
        nights.append(place)
        io.append(waits)
        communication.append(talks)
        compute.append(1.0 - waits - talks)
    if not nights:
        return None
    return Split(bench.id, tuple(nights), tuple(io), tuple(compute), tuple(communication), told)
