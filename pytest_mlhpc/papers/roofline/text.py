"""The roofline as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_mlhpc.papers.roofline.model import Device, Page, Point, attainable, bound, si
from pytest_mlhpc.store.text import clean, iso, minutes, one_line, table

_HEAD = ("workload", "FLOP/byte", "achieved", "of attainable", "bound by", "memory moved", "time in")
#: Classes of kernels that a line names.
_MOST = 3


def text_of(page: Page) -> str:
    """Return the page's text, safe to print."""
    parts = [f"since {minutes(page.since_ns)}; bytes are modelled where nothing else is said\n"]
    parts += [_device(device) for device in page.devices]
    parts += [f"note: {one_line(note, 400)}\n" for note in page.notes]
    return clean("\n".join(parts))


def data_of(page: Page | None) -> dict[str, Any]:
    """Return the page for programs: rates of one device in FLOP/s and B/s, times in seconds. Without a page it has no devices."""
    return {
        "devices": [_device_data(device) for device in page.devices] if page else [],
        "notes": list(page.notes) if page else [],
    }


def _device_data(device: Device) -> dict[str, Any]:
    machine, peaks = device.machine, device.peaks
    return {
        "machine": machine.id,
        "environment": machine.environment,
        "device_model": machine.device_model,
        "share": device.share,
        "peaks": {
            "flops": dict(peaks.flops),
            "copy": peaks.copy,
            "triad": peaks.triad,
            "cached": peaks.cached,
            "at": iso(peaks.created_ns),
        }
        if peaks
        else None,
        "points": [
            {
                "workload": point.workload,
                "label": point.label,
                "precision": point.precision,
                "batch": point.batch,
                "intensity": point.intensity,
                "flops": point.flops,
                "attainable": attainable(peaks, point),
                "bound_by": bound(peaks, point) or None,
                "step_s": point.step_s,
                "modelled": point.moved / point.step_s,
                "counted": point.counted,
                "shares": dict(point.shares),
                "trained": [{"name": one.name, "flops": one.flops} for one in point.trained],
            }
            for point in device.points
        ],
    }


def name_of(device: Device) -> str:
    """Return how a device is called."""
    machine = device.machine
    words = [machine.id, machine.device_model, machine.environment, device.share]
    return one_line(", ".join(word for word in words if word))


def peaks_of(device: Device) -> str:
    """Return the peaks in one line."""
    if device.peaks is None:
        return "no peaks are recorded"
    products = [
        f"{precision} {si(value, 'FLOP/s')}" for precision, value in sorted(device.peaks.flops.items())
    ]
    moved = [f"copy {si(device.peaks.copy, 'B/s')}", f"triad {si(device.peaks.triad, 'B/s')}"]
    shared = f" (share of one of {device.peaks.devices})" if device.peaks.devices > 1 else ""
    return f"measured peaks{shared}: {', '.join([*products, *moved])}, {minutes(device.peaks.created_ns)}"


def _device(device: Device) -> str:
    lines = f"{name_of(device)}\n  {peaks_of(device)}\n"
    if not device.points:
        return lines
    rows = [row for point in device.points for row in _rows(device, point)]
    return lines + "".join(f"  {line}\n" for line in table([_HEAD, *rows]).splitlines())


def _rows(device: Device, point: Point) -> Iterator[tuple[str, ...]]:
    roof = attainable(device.peaks, point)
    share = f"{point.flops / roof:.1%}" if roof else "-"
    yield (
        point.label,
        f"{point.intensity:.3g}",
        si(point.flops, "FLOP/s"),
        share,
        bound(device.peaks, point) or "-",
        memory_of(point),
        classes_of(point),
    )
    for one in point.trained:
        whole = f"{one.flops / roof:.1%}" if roof else "-"
        yield (f"  as trained by {one.name}", "", si(one.flops, "FLOP/s"), whole, "", "", "")


def memory_of(point: Point) -> str:
    """Return the bandwidth to memory: as counted where a counter was read, else by the model, and which of them it is."""
    if point.counted:
        return f"{si(point.counted, 'B/s')} counted"
    return f"{si(point.moved / point.step_s, 'B/s')} modelled"


def classes_of(point: Point) -> str:
    """Return the classes of kernels that take most of the time."""
    largest = sorted(point.shares.items(), key=lambda one: -one[1])[:_MOST]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)
