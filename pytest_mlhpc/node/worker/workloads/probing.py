"""No torch. Workloads that are no training: a volume, communication between ranks, an n-body step.

What they do and where their names come from: ``docs/storage-and-communication.md``.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.protocol.combine import SLOWEST_RANK
from pytest_mlhpc.node.worker.workloads.characters import CHARACTERS
from pytest_mlhpc.node.worker.workloads.definitions import ANY_PROBE, Field, Workload
from pytest_mlhpc.node.worker.workloads.fields import Wrong

_HERE = "pytest_mlhpc.node.worker.probes"

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "point_to_point")

#: Bytes of one element of a message: float32.
ELEMENT = 4

#: What O_DIRECT asks lengths, offsets and addresses to be multiples of: the largest block of disks (open(2), NOTES).
ALIGNMENT = 4096

#: Most bytes that each rank of `storage` holds in memory for its small files, or for its blocks; and about what Python needs
#: for a file's name, path and content beside the content itself.
MOST_HELD, _OBJECT = 4 * GIB, 256

BANDWIDTHS = ("write_bandwidth", "read_bandwidth")
FILE_RATES = ("create_rate", "stat_rate", "small_read_rate", "unlink_rate")


def size_name(size: int) -> str:
    """Return *size* bytes as part of a metric's name: ``8b``, ``64kib``, ``4mib``."""
    for unit, name in ((GIB, "gib"), (MIB, "mib"), (KIB, "kib")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}b"


def collective_metrics(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return the metrics of a `collective` run: time and bandwidths for each size."""
    kinds = ("time", "algorithm_bandwidth", "bus_bandwidth")
    labels = [size_name(size) for size in values["sizes"]]
    if values["operation"] == "point_to_point" and values["peers"] == "each":
        peers = [f"{label}_rank{peer}" for label in labels for peer in range(1, values["devices"])]
        labels += peers
    return tuple(f"{kind}_{label}" for label in labels for kind in kinds)


def _storage_metrics(values: Mapping[str, Any]) -> Tuple[str, ...]:
    names = (*BANDWIDTHS, *FILE_RATES)
    return tuple(f"{name}{SLOWEST_RANK}" for name in names) if values.get("devices", 1) > 1 else ()


def _collective(values: Mapping[str, Any]) -> Wrong:
    found: List[Tuple[str, str]] = []
    if values.get("devices", 2) < 2:
        found.append(("devices", "one rank has no partner; at least 2 are needed"))
    if odd := [size for size in values["sizes"] if size % ELEMENT]:
        found.append(("sizes", f"{odd[0]} bytes are no whole number of float32, of {ELEMENT} bytes each"))
    if values["peers"] != "last" and values["operation"] != "point_to_point":
        found.append(("peers", f"{values['operation']} is between all ranks; peers is for point_to_point"))
    return tuple(found)


def _storage(values: Mapping[str, Any]) -> Wrong:
    found: List[Tuple[str, str]] = []
    file_size, block_size = values["file_size"], values["block_size"]
    if file_size % block_size:
        found.append(
            ("block_size", f"file_size={file_size} is no multiple of block_size={block_size} (bytes)")
        )
    if values["io"] == "direct" and block_size % ALIGNMENT:
        text = f"block_size={block_size} is no multiple of {ALIGNMENT} bytes, as direct I/O wants"
        found.append(("block_size", text))
    if values["io"] == "direct" and values["cache"] == "warm":
        found.append(
            ("cache", "direct I/O reads past the page cache, so that cache='warm' would not be true")
        )
    found += _beyond_memory(values)
    return tuple(found)


def _beyond_memory(values: Mapping[str, Any]) -> Wrong:
    """Two blocks, and small files as they are written and as they are read, lie in each rank's memory."""
    block, small = 2 * values["block_size"], 2 * values["files"] * (values["small_file_size"] + _OBJECT)
    table = (("block_size", "two blocks are", block), ("small_file_size", "small files are", small))
    return tuple(
        (
            name,
            f"{what} held in each rank's memory: {size / GIB:,.1f} GiB, at most {MOST_HELD // GIB} are taken",
        )
        for name, what, size in table
        if size > MOST_HELD
    )


def _nbody(values: Mapping[str, Any]) -> Wrong:
    bodies, ranks = values["bodies"], values.get("devices", 1)
    if bodies % ranks:
        return (("bodies", f"{bodies} bodies do not divide over {ranks} devices"),)
    return ()


_PATH_HELP = (
    "folder on the nodes that the run makes a folder of its own in, may begin with ~ and hold $NAMES of the run's "
    "environment; empty: the run's own folder"
)

_STORAGE_FIELDS: Dict[str, Field] = {
    "path": Field("", _PATH_HELP, "str", identity=False),
    "file_size": Field(
        16 * GIB, "bytes that each rank writes to one file and reads", "size", minimum=ELEMENT
    ),
    "block_size": Field(MIB, "bytes of one write or read (IOR: transferSize)", "size", minimum=64),
    "files": Field(10_000, "small files that each rank creates, looks at, reads and unlinks", minimum=1),
    "small_file_size": Field(3901, "bytes of each small file (IO500's mdtest-hard: 3901)", "size", minimum=1),
    "io": Field(
        "buffered",
        "buffered: through the page cache, fsync before the clock stops; direct: O_DIRECT",
        "str",
        ("buffered", "direct"),
    ),
    "cache": Field(
        "cold", "state of the page cache before reading, verified", "str", ("cold", "warm", "unknown")
    ),
}

STORAGE = Workload(
    name="storage",
    summary="bandwidth and metadata rates of a volume: one large file and many small ones for each rank",
    module=f"{_HERE}.storage",
    fields=_STORAGE_FIELDS,
    presets={
        "smoke": {"file_size": 64 * MIB, "files": 200, "steps": 5, "warmup": 1},
        "small": {"file_size": GIB, "files": 1000, "steps": 5, "warmup": 1},
        "reference": {"file_size": 16 * GIB, "files": 10_000, "steps": 3, "warmup": 1},
    },
    judged=(*BANDWIDTHS, "create_rate", "small_read_rate"),
    reported=ANY_PROBE,
    expected=(*BANDWIDTHS, *FILE_RATES),
    sample="repetition",
    probe=True,
    without=("data",),
    expected_of=_storage_metrics,
    contradictions=_storage,
)

COLLECTIVE = Workload(
    name="collective",
    summary="communication between ranks by message size, as nccl-tests counts it",
    module=f"{_HERE}.collective",
    fields={
        "operation": Field("all_reduce", "what the ranks do", "str", OPERATIONS),
        "sizes": Field(
            [8, KIB, 32 * KIB, MIB, 32 * MIB, 256 * MIB],
            "bytes of a message; of the whole array for all_gather and reduce_scatter",
            "sizes",
            minimum=ELEMENT,
        ),
        "inner": Field(5, "operations of one timed repetition, one behind the other", minimum=1),
        "peers": Field(
            "last", "point_to_point: rank 0 with the last rank, or with each", "str", ("last", "each")
        ),
        "devices_per_node": Field(2, "accelerators of each node, one for each rank", minimum=1),
    },
    presets={
        "smoke": {"sizes": [8, 64 * KIB, 4 * MIB], "steps": 10, "warmup": 3},
        "small": {"sizes": [8, KIB, 32 * KIB, MIB, 32 * MIB], "steps": 20, "warmup": 5},
        "reference": {"sizes": [8, KIB, 32 * KIB, MIB, 32 * MIB, 256 * MIB], "steps": 20, "warmup": 5},
    },
    judged=("latency", "bus_bandwidth"),
    reported=ANY_PROBE,
    expected=("latency", "algorithm_bandwidth", "bus_bandwidth"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    expected_of=collective_metrics,
    contradictions=_collective,
)

NBODY = Workload(
    name="nbody",
    summary="gravity between all pairs of bodies, summed directly; each rank has its share of them",
    module=f"{_HERE}.nbody",
    fields={
        "bodies": Field(65_536, "bodies of all ranks together", minimum=2),
        "precision": Field("fp32", "arithmetic", "str", ("fp32", "fp64")),
        "seed": Field(0, "seed of where the bodies are and move to", minimum=0),
    },
    presets={
        "smoke": {"bodies": 1024, "steps": 20, "warmup": 4},
        "small": {"bodies": 8192, "steps": 20, "warmup": 4},
        "reference": {"bodies": 65_536, "steps": 20, "warmup": 4},
    },
    judged=("interaction_rate",),
    reported=ANY_PROBE,
    expected=("interaction_rate", "achieved_flops", "step_time"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_nbody,
)

PROBES: Tuple[Workload, ...] = (STORAGE, COLLECTIVE, NBODY, *CHARACTERS)
