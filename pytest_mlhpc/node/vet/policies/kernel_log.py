"""PAYLOAD. How many events of a kind in the kernel log a node may have had within the window (24 hours, after boot).

Xid and SXid have a module of their own.
"""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound

_MCELOG = "mcelog.conf, section dimm"
_AMD = "AMD node-scraper, dmesg analyzer; Linux, drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c"

BOUNDS: Tuple[Bound, ...] = (
    Bound(
        "kernel_log.closed",
        "the log could not be read: 1; fail gives UNKNOWN, as nobody can tell what is in it",
        "own: a check that cannot look must not pass; sites where users may not read the log set no stage",
        fail=1,
    ),
    Bound("kernel_log.off_bus", "GPUs that fell off the bus without an Xid", "NVSentinel issue 155", fail=1),
    Bound(
        "kernel_log.mce_uncorrected",
        "uncorrected machine checks and memory errors",
        f"{_MCELOG}: uc-error-threshold = 1 / 24h",
        fail=1,
    ),
    Bound(
        "kernel_log.mce_corrected",
        "corrected machine checks and memory errors",
        f"{_MCELOG}: ce-error-threshold = 10 / 24h (there for one DIMM)",
        warn=10,
    ),
    Bound("kernel_log.oom", "processes killed because the whole node had no memory", "own", warn=1),
    Bound("kernel_log.io_error", "I/O errors of one disk", "own", warn=1),
    Bound(
        "kernel_log.file_system",
        "errors of a file system that made it read-only or stopped it",
        "ext4(5), errors=remount-ro; xfs(5), shutdown",
        fail=1,
    ),
    Bound(
        "kernel_log.pcie_uncorrected",
        "uncorrected errors of one PCIe device",
        "Linux, Documentation/PCI/pcieaer-howto: the link, or what was sent by it, is not reliable",
        warn=1,
    ),
    Bound("kernel_log.amd_uncorrected", "uncorrectable errors of one AMD GPU", _AMD, fail=1),
    Bound("kernel_log.amd_reset", "resets and hung rings of one AMD GPU", _AMD, warn=1),
    Bound("kernel_log.amd_failed", "failed resets and starts of one AMD GPU", _AMD, fail=1),
)
