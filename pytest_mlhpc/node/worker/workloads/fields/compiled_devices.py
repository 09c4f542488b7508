"""No torch. Devices that take a training step as one program (ipu, wse): their fields, and what they cannot be asked for.

All fields are unset by default. On IPUs a device of a test is one rank, which drives ``ipu_replicas`` copies of the model on
``ipus_per_replica`` IPUs each: a run takes devices x ipu_replicas x ipus_per_replica IPUs (:func:`ipus_of_rank`).
"""

from __future__ import annotations

from typing import Any, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

DEVICES = ("ipu", "wse")

_REFUSED = {
    "until": "trains for a number of steps; until='quality' is for cpu, cuda, rocm and xpu",
    "bagging": "has no groups of ranks; bagging is for cpu, cuda, rocm and xpu",
    "parallel": "shares a model in a way of its own; parallel is for cpu, cuda, rocm and xpu",
    "gradient_compression": "exchanges gradients in a way of its own",
    "bucket_mb": "exchanges gradients in a way of its own",
    "batch_norm_group": "normalises in a way of its own",
    "loss_scale": "scales losses in a way of its own",
    "channels_last": "lays tensors out in a way of its own",
}


def wrong_together(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse modes and fields that only torch's own training loop has."""
    accelerator = values.get("accelerator")
    if accelerator not in DEVICES:
        return ()
    found = [(name, f"{accelerator} {text}") for name, text in _REFUSED.items() if values.get(name)]
    if accelerator == "wse" and values.get("gradient_accumulation", 1) > 1:
        text = "wse shares a batch by itself where it does not fit; say a global_batch alone"
        found.append(("gradient_accumulation", text))
    return tuple(found)


IPU = "ipu"

#: Partitions of IPUs have a power of 2 of them, at most 64 (EIDF's documentation; poptorch, ``Options.autoRoundNumIPUs``).
COUNTS = (1, 2, 4, 8, 16, 32, 64)
EXECUTIONS = ("pipelined", "sharded")
PARTIALS = ("float", "half")
#: poptorch, ``TensorLocations.numIOTiles``: an even number of these.
LEAST_TILES, MOST_TILES = 32, 192

IPU_FIELDS: Mapping[str, Field] = {
    "device_iterations": Field(
        None, "ipu only: steps that the IPUs do for one call of the host; unset: 1", minimum=1
    ),
    "ipus_per_replica": Field(
        None, "ipu only: IPUs that one copy of the model is spread over, block by block; unset: 1", "int", COUNTS
    ),
    "ipu_replicas": Field(
        None, "ipu only: copies of the model that one rank drives; unset: 1", "int", COUNTS
    ),
    "ipu_execution": Field(
        None, "ipu only: blocks at work on different micro-batches at once, or one after another; unset: pipelined",
        "str", EXECUTIONS,
    ),
    "ipu_partials": Field(
        None, "ipu only: type of partial sums of products and convolutions; unset: as poptorch has it", "str", PARTIALS
    ),
    "ipu_io_tiles": Field(
        None, "ipu only: tiles of each IPU that do input and output alone; unset: none", minimum=LEAST_TILES
    ),
}  # fmt: skip

#: Optimizers that poptorch takes as torch has them (``poptorch.trainingModel``).
IPU_OPTIMIZERS = ("sgd", "adam", "adamw")

Found = List[Tuple[str, str]]


def ipus_of_rank(values: Mapping[str, Any]) -> int:
    """Return how many IPUs one rank of a run with *values* drives."""
    return int(values.get("ipu_replicas") or 1) * int(values.get("ipus_per_replica") or 1)


def wrong_ipu(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse these fields on other devices, and on IPUs what poptorch has not, or not together."""
    accelerator = values.get("accelerator")
    if accelerator not in (None, IPU):
        text = f"is for Graphcore's IPUs; {accelerator} has none"
        return tuple((name, f"{name} {text}") for name in IPU_FIELDS if values.get(name) is not None)
    found = _wrong_amounts(values)
    if accelerator == IPU:
        found += _wrong_manner(values)
    return tuple(found)


def _wrong_amounts(values: Mapping[str, Any]) -> Found:
    found: Found = []
    each = int(values.get("ipus_per_replica") or 1)
    accumulate = int(values.get("gradient_accumulation") or 1)
    execution = values.get("ipu_execution")
    if execution is not None and each == 1:
        found.append(
            ("ipu_execution", f"ipu_execution={execution!r} is of several IPUs: set ipus_per_replica")
        )
    if each > 1 and execution != "sharded" and accumulate < each:
        text = f"a pipeline of {each} IPUs needs as many micro-batches to a step: gradient_accumulation={each} or more"
        found.append(("gradient_accumulation", f"{text}, or ipu_execution='sharded'"))
    tiles = values.get("ipu_io_tiles")
    if tiles is not None and (tiles > MOST_TILES or tiles % 2):
        found.append(
            ("ipu_io_tiles", f"ipu_io_tiles={tiles} is no even number from {LEAST_TILES} to {MOST_TILES}")
        )
    batch, parts = values.get("global_batch"), values.get("devices", 1) * accumulate
    replicas = int(values.get("ipu_replicas") or 1)
    if batch is not None and replicas > 1 and not batch % parts and batch % (parts * replicas):
        how = f"{values.get('devices', 1)} devices x gradient_accumulation={accumulate} x ipu_replicas={replicas}"
        found.append(("global_batch", f"global_batch={batch} does not divide over {how}"))
    iterations = int(values.get("device_iterations") or 1)
    for name in ("steps", "warmup"):
        if values.get(name) is not None and values[name] % iterations:
            text = f"{name}={values[name]} is no multiple of device_iterations={iterations}, the steps of one call"
            found.append((name, text))
    return found


def _wrong_manner(values: Mapping[str, Any]) -> Found:
    found: Found = []
    if values.get("precision", "fp32") != "fp32":
        found.append(
            ("precision", "on IPUs only fp32 has been written; ipu_partials='half' halves partial sums")
        )
    if values.get("optimizer", "sgd") not in IPU_OPTIMIZERS:
        text = f"poptorch has no {values['optimizer']} that computes as ours does; it takes {', '.join(IPU_OPTIMIZERS)}"
        found.append(("optimizer", text))
    if values.get("channels_last"):
        found.append(("channels_last", "the IPU's compiler lays out tensors itself; leave channels_last out"))
    return found


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what a run tells besides where one of these fields is set: compilation is timed apart."""
    return ("compile_time", "ipus") if any(values.get(name) is not None for name in IPU_FIELDS) else ()


WSE_FIELDS: Mapping[str, Field] = {
    "csx": Field(None, "wse only: Cerebras systems of the run, all driven by its one rank; unset: 1", minimum=1),
    "cerebras": Field(
        None, "wse only: cpu trains on the CPU back-end of Cerebras' package; unset: on the cluster", "str", ("cpu",)
    ),
}  # fmt: skip

#: Optimizers that cerebras.pytorch 2.10 has of its own.
WSE_OPTIMIZERS = ("sgd", "adam", "adamw", "lamb")


def wrong_wse(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse what is not for this device, and what this device cannot do."""
    accelerator = values.get("accelerator")
    if accelerator is None:
        return ()
    if accelerator != "wse":
        asked = [name for name in WSE_FIELDS if values.get(name) is not None]
        return tuple((name, f"{name} is for Cerebras systems; {accelerator} is none") for name in asked)
    found: List[Tuple[str, str]] = []
    if values.get("devices", 1) > 1:
        found.append(("devices", "one rank drives all Cerebras systems of a run: say csx=2 instead"))
    if values.get("optimizer", WSE_OPTIMIZERS[0]) not in WSE_OPTIMIZERS:
        found.append(
            ("optimizer", f"cerebras.pytorch has {', '.join(WSE_OPTIMIZERS)}, not {values['optimizer']}")
        )
    on_cpu = values.get("cerebras") == "cpu"
    if on_cpu and values.get("csx") is not None:
        found.append(("csx", "the CPU back-end has no systems"))
    batch, systems = values.get("global_batch"), values.get("csx") or 1
    if batch is not None and batch % systems:
        found.append(("global_batch", f"global_batch={batch} does not divide over csx={systems} systems"))
    precisions = ("fp32", "bf16") if on_cpu else ("fp32", "bf16", "fp16")
    if values.get("precision", "fp32") not in precisions:
        where = "its CPU back-end" if on_cpu else "a wafer"
        found.append(("precision", f"{where} computes in {', '.join(precisions)}, not {values['precision']}"))
    if values.get("data") == "device":
        found.append(("data", "samples are streamed to the wafer, none lie there; use memory or files"))
    return tuple(found)


FIELDS: Mapping[str, Field] = {**IPU_FIELDS, **WSE_FIELDS}


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse what such a device cannot be asked for, and fields of a device that the run does not have."""
    return (*wrong_together(values), *wrong_ipu(values), *wrong_wse(values))
