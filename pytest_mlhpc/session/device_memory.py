"""Whether a training fits into the memory of its devices: analytic, before anything is submitted. Pure.

Counted is what stays from step to step: parameters, gradients and the optimizer's states, all kept in fp32 whatever the
precision (autocast rounds copies), 4 bytes each; of them a shard has its part. Activations, copies in 16 bits, buffers of
communication and the one block that shards gather come on top: they depend on kernels and are not counted, so that what
is refused here can never run, and what is not refused may still run out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.config.quantities import format_size
from pytest_mlhpc.errors import Problem
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.worker.workloads.fields.parallel import layout
from pytest_mlhpc.session.parameter_counts import parameter_count

_FP32 = 4
_GIB = 2**30

#: Optimizer -> numbers that it keeps for each parameter (node/worker/workloads/optimizers.py): momentum, or Adam's two moments.
STATES = {"sgd": 1, "lars": 1, "adam": 2, "adamw": 2, "lamb": 2}

#: Name as the driver spells it -> GiB. Makers' data sheets: they write GB for what the driver shows as GiB less a reserve,
#: so that this is never too little. What a name says itself (A100-SXM4-40GB) is read from it; a GH200's name says the
#: memory of its CPU.
_MODELS: tuple[tuple[str, float], ...] = (
    (r"GH200.*144G", 144), (r"GH200", 96), (r"GB200|\bB200\b", 192), (r"\bH200\b", 141), (r"H100 NVL", 94),
    (r"MI355X", 288), (r"MI325X", 256), (r"MI300X", 192), (r"MI300A", 128), (r"MI250X?\b", 64), (r"MI210", 64),
    (r"MI100", 32), (r"Data Center GPU Max 1550", 128), (r"Data Center GPU Max 1100", 48),
)  # fmt: skip
_SAID = re.compile(r"(?<![0-9])([1-9][0-9]{0,2}) ?GB?\b")


@dataclass(frozen=True)
class Need:
    """Bytes that stay on one device between steps if it has the whole model, and how many parameters that are."""

    parameters: int
    unsharded: int

    def on_one_of(self, shards: int) -> int:
        """Return the bytes of one shard."""
        return -(-self.unsharded // shards)


def need_of(spec: JobSpec) -> Need | None:
    """Return what *spec*'s training needs, None where its number of parameters or its optimizer is not known."""
    states = STATES.get(str(spec.parameters.get("optimizer")))
    count = parameter_count(spec.workload, spec.parameters)
    if states is None or count is None:
        return None
    numbers = 2 + states
    if spec.parameters.get("gradient_compression") == "powersgd":
        numbers += 1  # what it did not send yet (error feedback)
    return Need(count, numbers * _FP32 * count)


def device_bytes(partition: Partition, ranks_of_node: int, node_memory: int) -> int | None:
    """Return the memory of one rank's device in bytes, None where nothing says it.

    On CPUs the share of *node_memory* that one of the node's ranks has; else what the partition says, or its model's.
    """
    if partition.accelerator == "cpu":
        return node_memory // max(1, ranks_of_node)
    if partition.nodes.device_memory:
        return partition.nodes.device_memory
    return model_bytes(partition.nodes.device_model)


def model_bytes(model: str) -> int | None:
    """Return the memory of a device by its name; None for an unknown one, and for a slice of a device (MIG)."""
    if re.search(r"\bMIG\b", model):
        return None
    for pattern, size in _MODELS:
        if re.search(pattern, model):
            return int(size * _GIB)
    said = _SAID.search(model)
    return int(said[1]) * _GIB if said else None


def too_large(specs: Sequence[JobSpec]) -> list[Problem]:
    """Return a problem for each training that cannot fit into the memory of its devices."""
    found = []
    for spec in specs:
        need = need_of(spec)
        if need is None:
            continue
        each = spec.ranks // spec.nodes
        has = device_bytes(spec.target.partition, each, spec.node_memory)
        how = layout(spec.parameters)
        shards = how.shard if how else 1
        if has and need.on_one_of(shards) > has:
            found.append(Problem(spec.node_id, "parallel", _sentence(spec, need, has, shards)))
    return found


def _sentence(spec: JobSpec, need: Need, has: int, shards: int) -> str:
    partition = spec.target.partition
    what = partition.nodes.device_model or (
        "rank's share of a node" if partition.accelerator == "cpu" else "device"
    )
    part = "" if shards == 1 else f", {format_size(need.on_one_of(shards))} on each of {shards} shards"
    least = -(-need.unsharded // has)
    return (
        f"needs {format_size(need.unsharded)} unsharded{part} ({need.parameters:,} parameters, their gradients and "
        f"{spec.parameters['optimizer']}'s states in fp32; activations come on top), but a {what} of {partition.id} has "
        f"{format_size(has)}: shard over at least {least}{_advice(spec.ranks, least)}"
    )


def _advice(ranks: int, least: int) -> str:
    """Return the smallest layout of *ranks* that would do, or that there are too few."""
    fitting = next((shard for shard in range(least, ranks + 1) if ranks % shard == 0), None)
    if fitting is None:
        return f" devices; this test has {ranks}"
    return f', such as parallel={{"replicate": {ranks // fitting}, "shard": {fitting}}}'
