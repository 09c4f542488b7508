"""PAYLOAD. Bounds for a node's processors, memory, clock, PCI bus and storage."""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound

_PROMISED = "the partition's description in systems.yaml, or --expect"
_MCELOG = "mcelog.conf, section dimm"

BOUNDS: Tuple[Bound, ...] = (
    Bound("inventory.cores", "processors fewer than described", _PROMISED, fail=1),
    Bound(
        "inventory.cores_smt",
        "cores fewer than described, where threads are more than described: either may be meant",
        _PROMISED,
        warn=1,
    ),
    Bound(
        "inventory.memory",
        "memory that Linux has, as share of what is described",
        "own: kernel and firmware keep 1 to 3 %; one module of 24 is 4 %",
        warn=0.97,
        fail=0.95,
        better="higher",
    ),
    Bound("inventory.expected", "properties that are not as described", _PROMISED, fail=1),
    Bound(
        "inventory.swap_used",
        "memory swapped out before the job, as share of all memory",
        "own: it comes back slowly, or someone else needs the memory",
        warn=0.1,
    ),
    Bound(
        "inventory.clock_error",
        "largest error of a disciplined clock",
        "own; adjtimex(2) maxerror. Logs of nodes that differ by more cannot be put in order",
        warn=1.0,
        unit="s",
    ),
    Bound("pci.missing", "accelerators that are not on the PCI bus", _PROMISED, fail=1),
    Bound(
        "pci.dead",
        "the device does not answer: 1",
        "PCI Express base specification 2.3.2: a read that fails returns all ones",
        fail=1,
    ),
    Bound(
        "edac.uncorrected",
        "uncorrected memory errors since the driver counts",
        f"{_MCELOG}: uc-error-threshold = 1 / 24h; LBNL NHC, check_hw_mcelog",
        fail=1,
    ),
    Bound(
        "edac.corrected",
        "corrected errors of one memory module in a day",
        f"{_MCELOG}: ce-error-threshold = 10 / 24h",
        warn=10,
        unit="1/d",
    ),
    Bound(
        "cpu_throttle.events",
        "times that a processor was throttled for heat during vetting",
        "Intel SDM volume 3B, 15.8: PROCHOT and thermal status; the kernel counts them",
        warn=1,
    ),
    Bound(
        "cpu_throttle.share",
        "share of the time of vetting that a processor was throttled for heat",
        "own: sustained, as for GPUs",
        fail=0.5,
    ),
    Bound(
        "cpu_throttle.clock",
        "clock of busy processors, median, as share of their base clock",
        "own: AVX-512 and AMX run little below base; a node held by PROCHOT or a power cap at a fifth to two fifths",
        warn=0.6,
        fail=0.4,
        better="higher",
    ),
    Bound(
        "cpu_throttle.cap",
        "highest clock that the operating system allows, as share of the base clock",
        "own: a limit that someone set and left (scaling_max_freq)",
        warn=0.99,
        better="higher",
    ),
    Bound(
        "storage.room",
        "bytes free where the node writes",
        "own: 256 MiB are written and read to measure, and less says little",
        warn=1 << 29,
        better="higher",
        unit="B",
    ),
    Bound(
        "storage.files",
        "files that may still be made where the node writes",
        "own: 100 are made to measure",
        warn=1000,
        better="higher",
    ),
    Bound(
        "storage.refused",
        "the folder for temporary files may not be written to: 1",
        "own: some programs need it",
        warn=1,
    ),
    Bound("storage.failed", "the named folder is refused, or reading and writing fails: 1", "own", fail=1),
)
