"""What events in the kernel's log mean: NVIDIA's Xid and SXid codes, and how many of a kind a node may have."""

from __future__ import annotations

import enum
from typing import Dict, FrozenSet, Tuple

from pytest_mlhpc.node.vet.policy import Bound

_MCELOG = "mcelog.conf, section dimm"
_AMD = "AMD node-scraper, dmesg analyzer; Linux, drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c"


#: Versions of the tables below.
XID_SOURCE = "NVIDIA Xid catalogue of 2025-10-29, immediate resolution"
SXID_SOURCE = "NVIDIA Fabric Manager user guide DU-09883-001 v1.3, appendix D"


class Xid(enum.Enum):
    """What an Xid asks for."""

    NODE = "node"  #: reset, restart, repair, or a workflow of the vendor's: the node is not fit
    APPLICATION = "application"  #: the application failed, not the node
    IGNORE = "ignore"
    REPEATED = "repeated"  #: ignored once, suspicious when it comes again
    C2C = "c2c"  #: the link between processor and GPU of a Grace Hopper; to be ignored elsewhere
    RECOVERY = "recovery"  #: says which recovery the driver wants by now
    FOLLOWS = "follows"  #: only ever follows another


#: RESTART_BM; RESET_GPU; CHECK_MECHANICALS; WORKFLOW_XID_48 and _NVLINK_ERR; WORKFLOW_NVLINK5_ERR; RESTART_VM.
_NODE = {
    *(79,),
    *(46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    *(54,),
    *(48, 74),
    *range(144, 151),
    *(151,),
}

#: RESTART_APP.
_APPLICATION = {
    *(
        8,
        11,
        13,
        25,
        31,
        32,
        39,
        40,
        41,
        60,
        68,
        69,
        70,
        71,
        72,
        75,
        76,
        77,
        80,
        82,
        83,
        84,
        85,
        86,
        88,
        89,
        94,
    ),
    *range(96, 106),
    *range(126, 136),
    *(139,),
}

#: IGNORE, and those of 162 to 164 that only inform.
_IGNORE = {
    *(14, 37, 38, 43, 44, 66, 67, 93, 106, 107, 108, 137, 141, 152, 153, 157, 160, 161, 162, 163),
}

XIDS: Dict[int, Xid] = {
    **dict.fromkeys(sorted(_NODE), Xid.NODE),
    **dict.fromkeys(sorted(_APPLICATION), Xid.APPLICATION),
    **dict.fromkeys(sorted(_IGNORE), Xid.IGNORE),
    63: Xid.REPEATED,
    92: Xid.REPEATED,
    121: Xid.C2C,
    154: Xid.RECOVERY,
    45: Xid.FOLLOWS,
    171: Xid.FOLLOWS,  # both tell more of a 48
    172: Xid.FOLLOWS,
}

#: What some codes are called, for the reason that users read.
XID_NAMES: Dict[int, str] = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halt",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    121: "C2C link error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    155: "NVLink software-defined error",
    156: "resource retired",
    158: "GPU fatal timeout",
}

#: PCI devices of Grace Hopper, whose GPU hangs on the processor by NVLink-C2C (pci.ids, GH100 [GH200 ...]).
C2C_DEVICES = frozenset({"0x2342", "0x2345", "0x2348"})

#: Appendix D.6, and 10003 of D.7: fatal to the whole fabric whatever else the line says.
SXID_ALWAYS_FATAL: FrozenSet[int] = frozenset({10003, 12020, 22003, 22011, *range(23001, 23018)})

#: Appendix D.5: fatal to a port. Counts where the line itself says neither Fatal nor Non-fatal.
SXID_FATAL: FrozenSet[int] = frozenset(
    {
        *(11001, 11009, 11013, 11018, 11019, 11020),
        *(12001, 12002, 12022, 12024, 12025, 12026, 12027, 12030, 12031, 12032),
        *(14017, 15001, 15006, 15009, 15010, 15012, 15013),
        *(19047, 19048, 19054, 19056, 19058, 19060, 19061, 19063, 19064, 19066, 19067, 19069, 19070),
        *(20034, 22012, 24004, 24005, 24006, 24007),
    }
)

#: Appendix D.4 and D.7: not fatal, but traffic stalls, a connection is bad, or the switch is too hot.
SXID_NOTABLE: FrozenSet[int] = frozenset({10001, 10002, 10004, 12028, 19084, 20012})

#: Appendix D.4 and D.7: corrected, retransmitted, or over. Others that are called Non-fatal pass as well.
SXID_HARMLESS: FrozenSet[int] = frozenset(
    {
        *(
            10005,
            11004,
            11012,
            11021,
            11022,
            11023,
            12021,
            12023,
            15008,
            15011,
            20001,
            22013,
            24001,
            24002,
            24003,
        ),
        *(19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071),
    }
)


BOUNDS: Tuple[Bound, ...] = (
    Bound(
        "kernel_log.closed",
        "the log could not be read: 1; fail gives UNKNOWN, as its content is not known",
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
    Bound("xid.node", "Xids on one GPU that ask for a reset, a restart or a repair", XID_SOURCE, fail=1),
    Bound(
        "xid.repeated",
        "Xids 63 or 92 (row remapped, high rate of single-bit errors) on one GPU",
        f"{XID_SOURCE} ignores them, Azure's health checks fail on the first; the middle is ours",
        warn=2,
    ),
    Bound("xid.c2c", "Xid 121 on a Grace Hopper", f"{XID_SOURCE}: to be ignored, contact support", warn=1),
    Bound(
        "xid.recovery",
        "GPUs whose last Xid 154 asks for another recovery action than None",
        f"{XID_SOURCE}: 154 informs on what another Xid needs",
        fail=1,
    ),
    Bound("xid.unlisted", "Xids on one GPU that our table does not know", "our table may be too old", warn=1),
    Bound("sxid.fatal", "fatal SXids on one NVSwitch", f"{SXID_SOURCE}.5 and .6", fail=1),
    Bound(
        "sxid.notable",
        "SXids that stall a link or tell of heat, on one NVSwitch",
        f"{SXID_SOURCE}.4 and .7",
        warn=1,
    ),
)
