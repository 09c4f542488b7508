"""No torch. Ensembles of independent base models (HPC AI500).

``bagging=(M, P)``: M base models, each trained on P devices, data-parallel or as ``parallel`` says, and on a bootstrap sample
of its own, all at once in one allocation. Unset by default: one training on all devices. With ``until="quality"`` they are
trained until the ensemble reaches the target.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

#: What a run tells of its ensemble besides; see ``node/worker/bagging/measure.py``.
METRICS = (
    "base_models",
    "base_models_failed",
    "ensemble_quality",
    "base_model_quality",
    "distinct_samples",
)

#: The same with ``until="quality"``: how often the ensemble was evaluated.
ROUNDS = "ensemble_rounds"

FIELDS: Mapping[str, Field] = {
    "bagging": Field(
        None,
        "(M, P): M base models on P devices each, instead of one training on all devices (HPC AI500)",
        "list",
    ),
}


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse what is no pair of numbers, a product other than the devices, and what contradicts an ensemble."""
    asked = values.get("bagging")
    if asked is None:
        return ()
    pair = list(asked)
    if len(pair) != 2 or not all(_counts(one) for one in pair):
        text = f"bagging={asked!r} is no pair (M, P) of whole numbers of at least 1: base models, and devices of each"
        return (("bagging", text),)
    models, each = pair
    found: List[Tuple[str, str]] = []
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
    return tuple(found)


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
    return (*METRICS, ROUNDS) if values.get("until") == "quality" else METRICS
