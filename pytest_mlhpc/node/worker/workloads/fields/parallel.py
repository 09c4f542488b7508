"""No torch. How ranks share the work: replicas and shards of one model, its gradients, and ensembles of independent models.

``parallel={"replicate": R, "shard": S}``: R replicas of the model, each of them spread over S ranks. S = 1 is data-parallel
training (DDP), R = 1 is fully sharded (ZeRO stage 3, arXiv 1910.02054; torch's FSDP2), and both above 1 is hybrid sharding:
shards within a group of S neighbouring ranks, replicas between groups. Compression and buckets are DDP's, so of replicas alone.

``bagging=(M, P)`` (HPC AI500): M base models, each trained on P devices, data-parallel or as ``parallel`` says, and on a bootstrap
sample of its own, all at once in one allocation. Unset by default: one training on all devices. With ``until="quality"`` they
are trained until the ensemble reaches the target.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field
from pytest_mlhpc.node.worker.workloads.fields import compiled_devices

#: Ways to send gradients: as they are, rounded to 16 bits, or as products of two thin matrices (arXiv 1905.13727).
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd")

#: Steps before PowerSGD begins: DDP rebuilds its buckets in the first ones (torch's documentation: at least 2).
POWERSGD_AFTER = 2

#: MiB in a bucket at most, a tebibyte: more than any device has. torch counts its bytes in 64 bits, and fails beyond.
_LARGEST_BUCKET = float(1 << 20)

#: What a run tells of its ensemble besides; see ``node/worker/ensemble.py``.
BAGGING_METRICS = (
    "base_models",
    "base_models_failed",
    "ensemble_quality",
    "base_model_quality",
    "distinct_samples",
)
#: The same with ``until="quality"``: how often the ensemble was evaluated.
BAGGING_ROUNDS = "ensemble_rounds"

FIELDS: Mapping[str, Field] = {
    "bagging": Field(
        None,
        "(M, P): M base models on P devices each, instead of one training on all devices (HPC AI500)",
        "list",
    ),
    "parallel": Field(
        None, "{'replicate': R, 'shard': S} with R x S devices; unset: each rank has a replica", "mapping"
    ),
    "gradient_compression": Field(
        None, "how gradients travel between replicas; unset: as they are", "str", COMPRESSIONS
    ),
    "backend": Field(
        None, "cpu only: what torch.distributed exchanges by; unset: gloo", "str", ("gloo", "mpi")
    ),
    "bucket_mb": Field(
        None, "MiB of gradients that replicas exchange at a time; unset: 25, as DDP", "float", minimum=0.001
    ),
    "batch_norm_group": Field(
        None,
        "neighbouring ranks that share the statistics of batch normalisation, or 'all'; unset: 1",
        "ranks",
        minimum=1,
    ),
}

#: Value of ``batch_norm_group`` for all ranks of a run, however many.
ALL_RANKS = "all"

Found = List[Tuple[str, str]]

_KEYS = ("replicate", "shard")


@dataclass(frozen=True)
class MeshLayout:
    """``replicate`` replicas of the model, each spread over ``shard`` ranks."""

    replicate: int
    shard: int


def layout(values: Mapping[str, Any]) -> Optional[MeshLayout]:
    """Return what ``parallel`` says, None where it is unset.

    Raises:
        ValueError: it is not the mapping that it should be; the text lists why.
    """
    asked = values.get("parallel")
    if asked is None:
        return None
    texts = _wrong_mapping(asked)
    if texts:
        raise ValueError("; ".join(texts))
    return MeshLayout(asked["replicate"], asked["shard"])


def batch_norm_ranks(values: Mapping[str, Any], world: int) -> int:
    """Return how many neighbouring ranks of *world* share the statistics of batch normalisation."""
    asked = values.get("batch_norm_group") or 1
    return world if asked == ALL_RANKS else int(asked)


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse what does not fit the devices, and what shards, a single device or an ensemble cannot have."""
    texts = [] if values.get("parallel") is None else _wrong_mapping(values["parallel"])
    if texts:
        return (*(("parallel", text) for text in texts), *_wrong_bagging(values))
    found: Found = []
    devices, how = devices_of_one(values), layout(values)
    if how is not None:
        needed = how.replicate * how.shard
        if devices not in (None, needed):
            whose = "a base model" if values.get("bagging") else "the test"
            text = (
                f"replicate={how.replicate} x shard={how.shard} are {needed} devices, {whose} has {devices}"
            )
            found.append(("parallel", text))
        if how.shard > 1:
            found += _wrong_with_shards(values)
    found += _wrong_exchange(values) + _wrong_backend(values) + _wrong_batch_norm(values)
    return (*found, *_wrong_bagging(values))


def _wrong_backend(values: Mapping[str, Any]) -> Found:
    """Refuse a backend where the device has its own, and MPI for what its ranks cannot do."""
    backend, accelerator = values.get("backend"), values.get("accelerator")
    if backend is None:
        return []
    if accelerator not in (None, "cpu"):
        return [("backend", f"backend is for ranks that compute on cores; {accelerator} has one of its own")]
    if backend != "mpi":
        return []
    if values.get("bagging"):
        return [("backend", "base models must be able to die alone, which ranks of one MPI cannot: use gloo")]
    compression = values.get("gradient_compression")
    if compression in ("fp16", "bf16"):
        text = (
            f"torch's MPI exchanges no numbers of 16 bits: use gloo, or no gradient_compression={compression}"
        )
        return [("backend", text)]
    return []


def _wrong_batch_norm(values: Mapping[str, Any]) -> Found:
    """Refuse groups that the ranks cannot form, and what has not been written for groups."""
    asked, devices = values.get("batch_norm_group"), values.get("devices")
    if asked in (None, 1) or values.get("accelerator") in compiled_devices.DEVICES:
        return []
    found: List[str] = []
    if devices == 1:
        found.append(f"batch_norm_group={asked!r} means nothing on one device, which has all samples")
    elif devices is not None and devices % batch_norm_ranks(values, devices):
        found.append(f"batch_norm_group={asked} does not divide the test's {devices} devices")
    if values.get("bagging"):
        found.append(
            "base models normalise by samples of their own ranks: leave batch_norm_group or bagging out"
        )
    found += [
        f"statistics of several ranks have not been written for {name}: leave one of both out"
        for name in ("compile", "cuda_graphs")
        if values.get(name)
    ]
    if values.get("backend") == "mpi" and asked not in (ALL_RANKS, devices):
        text = "torch's MPI does one exchange at a time, so that groups and gradients could wait for each other for ever"
        found.append(f"{text}: use batch_norm_group='all' or gloo")
    return [("batch_norm_group", text) for text in found]


def _wrong_exchange(values: Mapping[str, Any]) -> Found:
    """Refuse compression and buckets where nothing, or something else, is exchanged."""
    if values.get("devices") == 1:
        return [
            (name, f"{name} means nothing on one device, which exchanges no gradients")
            for name in _set(values)
        ]
    found: Found = []
    compression, warmup = values.get("gradient_compression"), values.get("warmup")
    if compression == "powersgd" and warmup is not None and warmup < POWERSGD_AFTER:
        text = f"powersgd begins after {POWERSGD_AFTER} steps, which must not be timed: warmup={warmup} is too short"
        found.append(("gradient_compression", text))
    if (values.get("bucket_mb") or 0) > _LARGEST_BUCKET:
        text = f"{values['bucket_mb']:g} MiB are more than any device has; {_LARGEST_BUCKET:.0f} at most"
        found.append(("bucket_mb", text))
    if compression not in (None, "none") and values.get("cuda_graphs"):
        found.append(("gradient_compression", "a graph cannot hold it: its hooks wait on the host"))
    return found


def _set(values: Mapping[str, Any]) -> List[str]:
    return [name for name in ("gradient_compression", "bucket_mb") if values.get(name) not in (None, "none")]


def _wrong_with_shards(values: Mapping[str, Any]) -> Found:
    found: Found = [
        (name, f"{name} is of replicas (DDP); shards travel block by block") for name in _set(values)
    ]
    if values.get("backend") == "mpi":
        found.append(("backend", "shards need collectives that torch's MPI has not; use gloo"))
    if values.get("batch_norm_group") not in (None, 1):
        found.append(("batch_norm_group", "batch_norm_group is of replicas (DDP), not of shards"))
    if values.get("compile") is not None:
        found.append(("compile", "sharded models are not compiled"))
    if values.get("fused_optimizer") and values.get("optimizer") == "sgd":
        text = "torch's fused SGD does not know sharded weights; its fused Adam and AdamW do"
        found.append(("fused_optimizer", text))
    if values.get("channels_last"):
        found.append(("channels_last", "torch cannot shard weights that are laid out with the channels last"))
    if values.get("precision") == "fp16":
        found.append(("precision", "scaling losses of fp16 over shards is not supported; use bf16"))
    return found


def _wrong_mapping(asked: Any) -> List[str]:
    """Return all that is wrong with the mapping by itself."""
    if not isinstance(asked, Mapping):
        return [f"expected a mapping of replicate and shard, found {asked!r}"]
    texts = []
    for key in asked:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            texts.append(f"unknown key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    texts += [f"{key} is missing" for key in _KEYS if key not in asked]
    for key in _KEYS:
        value = asked.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            texts.append(f"{key}={value!r} is not a number of at least 1")
    return texts


def _wrong_bagging(values: Mapping[str, Any]) -> Found:
    """Refuse what is no pair of numbers, a product other than the devices, and what contradicts an ensemble."""
    asked = values.get("bagging")
    if asked is None:
        return []
    pair = list(asked)
    if len(pair) != 2 or not all(_counts(one) for one in pair):
        text = f"bagging={asked!r} is no pair (M, P) of whole numbers of at least 1: base models, and devices of each"
        return [("bagging", text)]
    models, each = pair
    found: Found = []
    devices = values.get("devices")
    if devices is not None and models * each != devices:
        text = (
            f"bagging=({models}, {each}) is {models * each} devices, the run has {devices}: make them equal"
        )
        found.append(("bagging", text))
    if values.get("cache") == "cold":
        text = "a bootstrap sample holds samples several times, which come from the page cache from the second time on"
        found.append(("cache", f"{text}: leave cache='cold' out"))
    if values.get("staging"):
        text = "base models on one node would each copy the set: leave staging out, and stage before the test"
        found.append(("staging", text))
    return found


def devices_of_one(values: Mapping[str, Any]) -> Optional[int]:
    """Return how many devices train one model: a base model's P, without an ensemble all; None where that is not known."""
    asked = values.get("bagging")
    pair = list(asked) if isinstance(asked, (list, tuple)) else []
    if len(pair) == 2 and all(_counts(one) for one in pair):
        return int(pair[1])
    devices = values.get("devices")
    return None if devices is None else int(devices)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what a run of an ensemble must tell."""
    if not values.get("bagging"):
        return ()
    return (*BAGGING_METRICS, BAGGING_ROUNDS) if values.get("until") == "quality" else BAGGING_METRICS
