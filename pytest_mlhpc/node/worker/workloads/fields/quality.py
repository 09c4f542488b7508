"""No torch. Training to a quality target (MLPerf HPC).

All fields are unset by default; each means something with ``until="quality"`` alone. ``schedule`` is a mapping, see
``node/worker/quality/rules.py``; unset: that of the workload's reference.
"""

from __future__ import annotations

import difflib
from typing import Any, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

#: Training epochs after which a run without ``max_epochs`` gives up: those of the CosmoFlow reference (configs/cosmo.yaml).
MAX_EPOCHS = 128

#: Samples of a synthetic set that is made for a run, training and evaluation.
MADE_TRAINING, MADE_EVALUATION = 256, 64

KINDS = ("constant", "multistep", "cosine", "poly")

#: Key of ``schedule`` -> type, for people too.
SCHEDULE: Mapping[str, str] = {
    "kind": "str", "by": "str", "warmup": "number", "warmup_factor": "number", "base_batch": "number",
    "milestones": "list", "factors": "list", "length": "number", "end": "number", "power": "number",
}  # fmt: skip

FIELDS: Mapping[str, Field] = {
    "until": Field(None, "quality: train until the target is reached, instead of `steps` steps", "str", ("quality",)),
    "target": Field(None, "quality to reach; unset: the benchmark's own (MLPerf)", "float"),
    "max_epochs": Field(None, f"training epochs after which the target is missed; unset: {MAX_EPOCHS}", minimum=1),
    "max_seconds": Field(
        None, "seconds after which the target is missed; unset: 90 % of the time limit", "float", minimum=0.001
    ),
    "evaluate_every": Field(None, "training epochs from one evaluation to the next; unset: 1, resnet50: 4", minimum=1),
    "train_samples": Field(
        None, f"samples of a training epoch; unset: all of the set, {MADE_TRAINING} if it is made", minimum=1
    ),
    "eval_samples": Field(
        None, f"samples of an evaluation; unset: all of the set, {MADE_EVALUATION} if it is made", minimum=1
    ),
    "schedule": Field(None, "of the learning rate: a mapping; unset: the reference's", "mapping"),
    "staging": Field(
        None, "how samples get to node-local storage within the run: files or archives; unset: not at all", "str",
        ("files", "archives"),
    ),
    "staging_path": Field(
        None, "folder of node-local storage, with $VARIABLES of the node; unset: $TMPDIR", "str", identity=False
    ),
    "staging_share": Field(None, "what each node gets: all samples, or its share; unset: all", "str", ("all", "node")),
    "staging_workers": Field(None, "files that a rank copies at a time; unset: 4", minimum=1),
}  # fmt: skip

#: Kind of schedule -> keys that mean something to it, beside ``kind``, ``by`` and those of warm-up.
_OF_KIND: Mapping[str, Tuple[str, ...]] = {
    "constant": (), "multistep": ("milestones", "factors"), "cosine": ("length", "end"), "poly": ("length", "end", "power"),
}  # fmt: skip
_OF_ALL = ("kind", "by", "warmup", "warmup_factor", "base_batch")

#: Fields that only workloads have whose quality is a share of right answers, which is 1 at most: ResNet-50, DeepCAM.
_OF_SHARES = ("image_size", "width_multiplier")

#: Fields that mean nothing without ``staging``.
_STAGED = ("staging_path", "staging_share", "staging_workers")

#: Fields of a window of steps, of which a run to a quality target has none.
WINDOW = ("steps", "warmup")

Found = List[Tuple[str, str]]


def to_quality(values: Mapping[str, Any]) -> bool:
    """Return whether a run with *values* trains until a quality is reached."""
    return values.get("until") == "quality"


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse fields that would mean nothing, a warm cache, data that was never on storage, and odd schedules."""
    if values.get("until") is None:
        set_ = [name for name in FIELDS if name != "until" and values.get(name) is not None]
        return tuple((name, f"{name} means nothing without until='quality'") for name in set_)
    found = [*_wrong_data(values), *_wrong_mode(values), *_wrong_staging(values), *_wrong_amounts(values)]
    found += _wrong_target(values)
    if values.get("schedule") is not None:
        found += [("schedule", text) for text in wrong_schedule(values["schedule"])]
    return tuple(found)


def _wrong_data(values: Mapping[str, Any]) -> Found:
    found: Found = []
    if values.get("cache") == "warm":
        text = (
            "time to train counts from the first touch of data that is in no cache: use cache='cold', or none"
        )
        found.append(("cache", text))
    if values.get("data") in ("memory", "device"):
        text = (
            f"data={values['data']!r} was never on storage, but time to train counts from there: use data='files', "
            "a data set of the system, or a path"
        )
        found.append(("data", text))
    return found


def _wrong_target(values: Mapping[str, Any]) -> Found:
    """Refuse what no model can reach: it would be trained to its last epoch for nothing."""
    target = values.get("target")
    if target is None:
        return []
    if any(name in values for name in _OF_SHARES):
        if target > 1:
            text = f"target={target:g} is beyond 1, which is all answers right; {target:g} % are {target / 100:g}"
            return [("target", text)]
    elif target < 0:
        return [("target", f"target={target:g}: an error cannot be below 0")]
    return []


def _wrong_mode(values: Mapping[str, Any]) -> Found:
    found: Found = []
    if values.get("cuda_graphs"):
        text = "a captured step keeps the learning rate of its first time, but a schedule changes it: cuda_graphs=False"
        found.append(("cuda_graphs", text))
    return found


def _wrong_staging(values: Mapping[str, Any]) -> Found:
    if values.get("staging") is None:
        return [(name, f"{name} means nothing without staging") for name in _STAGED if values.get(name)]
    if values.get("staging_share") != "node":
        return []
    if "context" in values:
        return [("staging_share", "text is one string of bytes, of which nodes cannot have shares")]
    if "image_size" in values and values["staging"] == "archives":
        text = "a node with a share of the archives does not see all class folders: use staging='files'"
        return [("staging_share", text)]
    return []


def _wrong_amounts(values: Mapping[str, Any]) -> Found:
    found: Found = []
    samples, batch = values.get("train_samples"), values.get("global_batch")
    if samples and batch and samples < batch:
        found.append(("train_samples", f"train_samples={samples} is less than one step of {batch} samples"))
    evaluated, devices = values.get("eval_samples"), values.get("devices", 1)
    if evaluated and evaluated < devices:
        text = f"eval_samples={evaluated} is less than one for each of {devices} devices"
        found.append(("eval_samples", text))
    return found


def wrong_schedule(schedule: Mapping[str, Any]) -> List[str]:
    """Return all that is wrong with a ``schedule``."""
    texts = []
    for key, value in schedule.items():
        if key not in SCHEDULE:
            near = difflib.get_close_matches(str(key), SCHEDULE, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else f"; there are {', '.join(SCHEDULE)}"
            texts.append(f"unknown key {key!r}{hint}")
        elif not _fits(SCHEDULE[key], value):
            texts.append(f"{key}={value!r} is not {_WORDS[SCHEDULE[key]]}")
    return texts or _wrong_together(schedule)


_WORDS = {"str": "a word", "number": "a number of at least 0", "list": "a list of numbers of at least 0"}


def _fits(kind: str, value: Any) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "list":
        return isinstance(value, (list, tuple)) and all(_fits("number", one) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def _wrong_together(schedule: Mapping[str, Any]) -> List[str]:
    texts = []
    kind, by = schedule.get("kind", "constant"), schedule.get("by", "epochs")
    if kind not in KINDS:
        texts.append(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    else:
        texts += [
            f"{key} means nothing to kind={kind!r}"
            for key in schedule
            if key not in (*_OF_ALL, *_OF_KIND[kind])
        ]
    if "warmup_factor" in schedule and not schedule.get("warmup"):
        texts.append("warmup_factor means nothing without warmup")
    if "warmup_factor" in schedule and "base_batch" in schedule:
        texts.append("warmup_factor and base_batch both say where warm-up starts: leave one out")
    if schedule.get("base_batch", 1) < 1:
        texts.append(f"base_batch={schedule['base_batch']} is less than one sample")
    if by not in ("epochs", "steps"):
        texts.append(f"by={by!r} is not one of epochs, steps")
    milestones, factors = list(schedule.get("milestones", ())), list(schedule.get("factors", ()))
    if kind == "multistep" and (not milestones or len(milestones) != len(factors)):
        texts.append("multistep needs milestones, and as many factors: the rate after each over the full one")
    if milestones != sorted(set(milestones)):
        texts.append(f"milestones={milestones} are not in ascending order")
    if kind in ("cosine", "poly") and not schedule.get("length"):
        texts.append(
            f"{kind} needs length: the epochs or steps, from the start, in which the rate falls to its end"
        )
    elif kind in ("cosine", "poly") and schedule["length"] <= schedule.get("warmup", 0):
        texts.append(f"length={schedule['length']} is not beyond warmup={schedule.get('warmup', 0)}")
    return texts


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what a run to a quality target must tell."""
    if values.get("until") is None:
        return ()
    return ("time_to_train", "staging_time", "training_time", "evaluation_time", "epochs", "quality")
