"""``--mlhpc-set slurm.KEY=VALUE``: options of the scheduler that differ from systems.yaml for one session. ``--mlhpc-against``: the second side of a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.errors import Problem, SpecError, UsageError, nearest
from pytest_mlhpc.node.files import may_be_secret

#: Keys of the partition itself: the time limit of runs whose tests set none. ``time`` is sbatch's own word for it.
_TIME_LIMIT: Final = frozenset({"time", "time_limit"})

#: Keys that say who pays, when and on which of the partition's equal nodes: they change no figure. All others may, so
#: that records made with them feed no verdict.
_NEUTRAL: Final = _TIME_LIMIT | {
    "account", "client", "comment", "energy", "exclude", "max_time", "nodelist", "pending_limit", "qos", "reservation",
    "shared_directory",
    "annotations", "context", "generate_name", "image_pull_secrets", "keep", "keep_for", "kubeconfig", "labels",
    "namespace", "patience", "priority_class", "reprovision", "service_account", "ttl",
}  # fmt: skip

_SHAPE: Final = re.compile(r"(?P<scheduler>[A-Za-z0-9_-]+)\.(?P<key>[A-Za-z0-9_]+)=(?P<value>.*)", re.DOTALL)


def parse(texts: Sequence[str]) -> dict[str, str]:
    """Return ``{"slurm.reservation": "maint42"}`` for what was given to --mlhpc-set, in order.

    Raises:
        UsageError: a text has another form, or a key comes twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise UsageError(f"--mlhpc-set {text}: write it like --mlhpc-set slurm.reservation=maint42")
        name = f"{match['scheduler']}.{match['key']}"
        if name in found:
            raise UsageError(f"--mlhpc-set {text}: {name} is set to {found[name]!r} already")
        found[name] = match["value"]
    return found


_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Keys that say how long it is compared, not with what.
_TERMS: Final = frozenset({"precision", "runs"})
_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


@dataclass(frozen=True)
class Against:
    """What B of ``--mlhpc-against`` has instead of A's; empty: the same. ``precision`` is a share, None: the usual; so are ``runs``."""

    environment: str = ""
    rev: str = ""  #: a git revision (``session/revision.py``)
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    precision: float | None = None
    runs: int | None = None  #: most runs, both sides together

    def __str__(self) -> str:
        """Return what differs as it was given; of a variable that may be a secret, the name alone."""
        return ", ".join(word for word in self.values if not word.startswith(("precision=", "runs=")))

    @property
    def values(self) -> tuple[str, ...]:
        """The values of the option, of a variable that may be a secret without its value."""
        shown = {name: "***" if may_be_secret(name) else text for name, text in self.variables.items()}
        precision = [f"precision={100 * self.precision:g}%"] if self.precision is not None else []
        runs = [f"runs={self.runs}"] if self.runs is not None else []
        named = (("environment", self.environment), ("rev", self.rev), ("image", self.image))
        return (
            *(f"{key}={text}" for key, text in named if text),
            *(f"variables.{name}={text}" for name, text in shown.items()),
            *precision,
            *runs,
        )


def parse_against(texts: Sequence[str]) -> Against:
    """Return what ``--mlhpc-against environment=old``, ``rev=main``, ``variables.NCCL_ALGO=Ring`` and the like say.

    Raises:
        UsageError: a text has another form, a key is unknown or comes twice, or nothing would differ.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        kind, _, variable = key.partition(".")
        known = ("environment", "rev", "image", *_TERMS)
        good = _VARIABLE.fullmatch(variable) if kind == "variables" else key in known and value.strip()
        if not equals or not good or "\0" in value:
            hint = nearest(key, known)
            raise UsageError(
                f"--mlhpc-against {text}: write environment=NAME, rev=REVISION, image=IMAGE, variables.NAME=VALUE, precision=1% or runs=12"
                + (f" (did you mean {hint}=...?)" if hint and hint != key else "")
            )
        if key in found:
            raise UsageError(f"--mlhpc-against {text}: {key} is {found[key]!r} already")
        found[key] = value
    if not found.keys() - _TERMS:
        raise UsageError(f"--mlhpc-against {texts[0]}: say what differs, too, such as environment=NAME")
    variables = {
        name.partition(".")[2]: value for name, value in found.items() if name.startswith("variables.")
    }
    environment, rev, image = (found.get(key, "") for key in ("environment", "rev", "image"))
    if environment and (rev or image):
        other = "rev" if rev else "image"
        raise UsageError(
            f"--mlhpc-against {texts[0]}: environment= and {other}= exclude each other: B differs in one of them"
        )
    return Against(
        environment, rev, image, variables, _precision(found.get("precision")), _runs(found.get("runs"))
    )


def _precision(text: str | None) -> float | None:
    if text is None:
        return None
    match = _PERCENT.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= 50:
        raise UsageError(
            f"--mlhpc-against precision={text}: write a share above 0 and up to 50 %, such as 1%"
        )
    return float(match[1]) / 100


def _runs(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,2}", text) or int(text) % 2 or not 4 <= int(text) <= 30:
        raise UsageError(f"--mlhpc-against runs={text}: write an even number from 4 to 30")
    return int(text)


def neutral(overrides: Iterable[str]) -> bool:
    """Whether figures measured with these keys set compare with all others of their series."""
    return all(name.partition(".")[2] in _NEUTRAL for name in overrides)


def apply(
    targets: Sequence[Target], overrides: Mapping[str, str], models: Mapping[str, type[Any] | None]
) -> tuple[Target, ...]:
    """Return *targets* with *overrides* in place of what systems.yaml says; *models* are the schedulers' by name.

    Raises:
        UsageError: no selected partition has this scheduler; or (SpecError) a key or value is wrong, all of them at once.
    """
    if not overrides:
        return tuple(targets)
    selected = {target.partition.scheduler for target in targets}
    problems = [
        Problem(f"--mlhpc-set {name}={value}", "", _not_selected(name.partition(".")[0], selected, models))
        for name, value in overrides.items()
        if name.partition(".")[0] not in selected
    ]
    if problems:
        raise SpecError(problems)
    changed: dict[str, Partition] = {}
    for target in targets:
        partition = target.partition
        if partition.id not in changed:
            changed[partition.id] = _changed(partition, overrides, models.get(partition.scheduler), problems)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return tuple(replace(target, partition=changed[target.partition.id]) for target in targets)


def _not_selected(scheduler: str, selected: Iterable[str], models: Mapping[str, Any]) -> str:
    known = ", ".join(sorted(selected))
    if hint := nearest(scheduler, selected):
        return f"no selected partition has scheduler {scheduler!r} (did you mean {hint!r}?)"
    which = "no selected partition has" if scheduler in models else "no installed package serves"
    return f"{which} scheduler {scheduler!r}; selected: {known}"


def _changed(
    partition: Partition, overrides: Mapping[str, str], model: type[Any] | None, problems: list[Problem]
) -> Partition:
    given = {
        name.partition(".")[2]: value
        for name, value in overrides.items()
        if name.partition(".")[0] == partition.scheduler
    }

    def problem(key: str, message: str, suggestion: str = "") -> None:
        problems.append(
            Problem(f"--mlhpc-set {partition.scheduler}.{key}={given.get(key, '')}", "", message, suggestion)
        )

    for key in sorted(_TIME_LIMIT & given.keys()):
        try:
            partition = replace(partition, time_limit_s=_duration(given[key]))
        except ValueError as error:
            problem(key, str(error))
    options = {key: value for key, value in given.items() if key not in _TIME_LIMIT}
    if model is None:
        for key in options:
            problem(key, f"scheduler {partition.scheduler} takes no options")
        return partition
    return replace(partition, scheduler_options=_validated(model, partition, options, problem))


def _validated(
    model: type[Any], partition: Partition, given: Mapping[str, str], problem: Any
) -> Mapping[str, Any]:
    """Return the scheduler's options with *given*, by the model that checked systems.yaml."""
    from pydantic import ValidationError

    fields = model.model_fields
    known = {key for key in given if key in fields}
    for key in given.keys() - known:
        problem(
            key, f"{partition.scheduler} has no such option", nearest(key, [*fields, *sorted(_TIME_LIMIT)])
        )
    values = {key: _value(fields[key].annotation, given[key]) for key in known}
    try:
        return dict(model.model_validate({**partition.scheduler_options, **values}).model_dump())
    except ValidationError as error:
        for one in error.errors(include_url=False):
            key = str(one["loc"][0]) if one["loc"] else next(iter(given), "")
            context = one.get("ctx", {})
            problem(key, str(context.get("error") or one["msg"]), _choice(one, given.get(key, "")))
        return partition.scheduler_options


def _choice(error: Any, value: str) -> str:
    expected = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    return nearest(value, expected)


def _value(annotation: Any, text: str) -> Any:
    """Return *text* as YAML would give it where the field is no text: true and false, and a list of one."""
    if getattr(annotation, "__origin__", None) is list:
        return [text] if text else []
    return {"true": True, "false": False}.get(text, text) if "bool" in str(annotation) else text


def _duration(text: str) -> float:
    from pytest_mlhpc.config.quantities import parse_duration

    return parse_duration(text)
