"""The fault corpus: nodes described in YAML, with the verdict that a cited source demands.

One file under ``corpus/<group>/`` is one case:

title, source     what it is; the document and section that demands the verdict
kind              good | bad | unreadable | odd
base              another YAML file of the corpus to build on, relative to this one: mappings are merged, all else replaces.
                  Into a list of the base, a mapping with numbers as keys merges by place: ``devices: {2: {...}}``
abstract          true: only a base for others, no case
files             {absolute path: text, number, null (absent), {error: EACCES, folder: true}, {link: target},
                  {folder: true}, {hex: "ff00"}, {text: "...", times: 10000}}; ``{0..3}`` in a path stands for each number
nvml, amdsmi      specifications for the fakes of ``fake_nvml.py`` and ``fake_amdsmi.py``: modules pynvml and amdsmi
commands          {"program" or "program and arguments": null (not installed) or {code, output, errors}}; none by default
environ, wanted   the environment; the fields of ``ExpectedNode``
answers           {address: true (somebody listens), false (refused), or the words of an error}; refused by default
bounds            {key of the policy: {warn, fail}} that replace our own
time              the node's clock: ISO 8601 or seconds since 1970
sync              {synced, error_s}: what the kernel says of that clock; null: it does not. By default it is synchronised
room              {free, files}: what is free on every file system; by default what really is
during, after     the same keys again, laid over the rest at a watch's ``sample`` and its ``end``
host, hosts, window_s    of ``check.Context``
checks            names of checks and watches; default: all of the group
expect            list of {check, severity, rule, device} (rule and device default to "") of all findings that are not
                  PASS or INFO; that a check raises Unreadable counts as its UNKNOWN without rule and device
facts, readings   {name: value} and {key: value} that must be among what is said, optional
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pytest_mlhpc.node.vet.check import Check, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.machine import (
    ClockState,
    Context,
    Done,
    ExpectedNode,
    Machine,
    Room,
    Unreadable,
)
from pytest_mlhpc.node.vet.policy import Bound, Policy, built_in

CORPUS = Path(__file__).parent / "corpus"

#: Where nodes are laid out: memory if there is some, as many small folders take long on a disk.
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

KEYS = {
    "title", "source", "kind", "base", "abstract", "files", "nvml", "amdsmi", "commands", "environ", "wanted", "bounds",
    "answers", "time", "sync", "room", "during", "after", "host", "hosts", "window_s", "checks", "expect", "facts", "readings",
}  # fmt: skip
KINDS = {"good", "bad", "unreadable", "odd"}

#: Folders of cases whose checks are called so; all others are of the host.
GROUPS = ("nvidia", "amd", "graphcore", "cerebras", "job")

#: How often a watch samples a case under load.
SAMPLES = 3

#: Both look through folders, which takes longer than most cases.
every_check = functools.cache(all_checks)
our_policy = functools.cache(built_in)

Row = tuple[str, str, str, str]  #: check, severity, rule, device


@dataclass(frozen=True, eq=False)
class Case:
    """One case, merged with its bases."""

    name: str
    group: str
    data: Mapping[str, Any]

    @property
    def expected(self) -> list[Row]:
        rows = self.data.get("expect") or []
        for row in rows:
            if unknown := set(row) - {"check", "severity", "rule", "device"}:
                raise ValueError(f"{self.name}: expect has no {sorted(unknown)}")
        return sorted(
            (row["check"], row["severity"], str(row.get("rule", "")), str(row.get("device", "")))
            for row in rows
        )


@dataclass
class RecordedMachine(Machine):
    """A node made up in a folder; ``denied`` are paths with the error that they give, whoever runs the tests."""

    denied: dict[str, int] = field(default_factory=dict)
    now: float | None = None
    answers: Mapping[str, bool | str] = field(default_factory=dict)
    sync: Mapping[str, Any] | None = None
    space: Mapping[str, Any] | None = None

    def _deny(self, name: str, *, below_only: bool = False) -> None:
        if not self.denied:
            return  # as in most cases; making Paths takes longer than the rest of a reading
        above = [str(parent) for parent in Path(name).parents]
        for path in above if below_only else [name, *above]:
            if code := self.denied.get(path):
                raise OSError(code, os.strerror(code), name)

    def _read(self, name: str, most: int) -> bytes:
        self._deny(name)
        return super()._read(name, most)

    def _look(self, name: str) -> None:
        self._deny(name, below_only=True)
        super()._look(name)

    def names(self, pattern: str) -> list[str]:
        found = super().names(pattern)
        if not self.denied:
            return found
        return [
            name for name in found if not any(str(parent) in self.denied for parent in Path(name).parents)
        ]

    def names_in(self, folder: str) -> list[str]:
        if code := self.denied.get(folder):
            raise Unreadable(f"{folder} cannot be read: {os.strerror(code)}", code)
        return super().names_in(folder)

    def room(self, folder: str) -> Room:
        real = super().room(folder)
        return real if self.space is None else Room(**self.space)

    def clock_state(self) -> ClockState:
        if self.sync is None:
            raise Unreadable("the kernel does not say whether its clock is right")
        return ClockState(**self.sync)

    def _records(self) -> bytes:
        self._deny("/dev/kmsg")
        return self.path("/dev/kmsg").read_bytes()

    def connect(self, address: str, port: int, timeout_s: float) -> bool:
        answer = self.answers.get(address, False)
        if isinstance(answer, str):
            raise Unreadable(f"{address} cannot be reached: {answer}")
        return answer

    def clock(self) -> float:
        return super().clock() if self.now is None else self.now


def merged(base: Any, over: Any) -> Any:
    """Return *over* laid on *base*."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {
            key: merged(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}
        }
    if (
        isinstance(base, list)
        and isinstance(over, Mapping)
        and over
        and all(isinstance(key, int) for key in over)
    ):
        return [merged(entry, over[place]) if place in over else entry for place, entry in enumerate(base)]
    return over


@functools.cache
def _parsed(path: Path) -> dict[str, Any]:
    data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    if not isinstance(data, dict) or (unknown := set(data) - KEYS):
        raise ValueError(f"{path}: no mapping, or unknown keys {sorted(unknown)}")
    return data


def _loaded(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in seen:
        raise ValueError(f"{path} is its own base")
    data = dict(_parsed(path))
    base = data.pop("base", None)
    if base is None:
        return data
    below = _loaded((path.parent / base).resolve(), (*seen, path))
    below.pop("abstract", None)
    return merged(below, data)


def load(path: Path) -> Case | None:
    """Return the case in a file, or None if it is only a base."""
    data = _loaded(path.resolve())
    if data.get("abstract"):
        return None
    for key in ("title", "source"):
        if not data.get(key):
            raise ValueError(f"{path}: a case needs {key}")
    if data.get("kind") not in KINDS:
        raise ValueError(f"{path}: kind is one of {sorted(KINDS)}")
    group = path.relative_to(CORPUS).parts[0]
    return Case(str(path.relative_to(CORPUS).with_suffix("")), group, data)


@functools.cache
def all_cases() -> list[Case]:
    """Return all cases, by name; a file that is no case is one that has only ``broken``, which says why."""
    found = []
    for path in sorted(CORPUS.rglob("*.yaml")):
        try:
            found.append(load(path))
        except (ValueError, OSError, yaml.YAMLError) as error:
            name = path.relative_to(CORPUS).with_suffix("")
            found.append(Case(str(name), name.parts[0], {"kind": "odd", "broken": str(error), "checks": []}))
    return [case for case in found if case is not None]


# -- the node ---------------------------------------------------------------------------------------------------------


def _spread(path: str) -> list[str]:
    match = re.search(r"\{(\d+)\.\.(\d+)\}", path)
    if not match:
        return [path]
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [
        one
        for number in numbers
        for one in _spread(path[: match.start()] + str(number) + path[match.end() :])
    ]


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        for child in place.iterdir():
            _remove(child)
        place.rmdir()
    elif place.is_symlink() or place.exists():
        place.unlink()


def _lay(machine: RecordedMachine, files: Mapping[str, Any]) -> None:
    for pattern, content in files.items():
        for name in _spread(pattern):
            place = machine.path(name)
            machine.denied.pop(name, None)
            if place.is_file() or not (isinstance(content, Mapping) and content.get("folder")):
                _remove(place)
            if content is None:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if not isinstance(content, Mapping):
                place.write_text(f"{content}")
                continue
            if content.get("error"):
                machine.denied[name] = getattr(errno, content["error"])
            if "link" in content:
                place.symlink_to(content["link"])
            elif content.get("folder"):
                place.mkdir(exist_ok=True)
            elif "hex" in content:
                place.write_bytes(bytes.fromhex(str(content["hex"])))
            else:
                place.write_text(str(content.get("text", "")) * int(content.get("times", 1)))


def _modules(data: Mapping[str, Any]) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    if data.get("nvml") is not None:
        from fake_nvml import FakeNvml

        modules["pynvml"] = FakeNvml(data["nvml"])
    if data.get("amdsmi") is not None:
        from fake_amdsmi import FakeAmdsmi

        modules["amdsmi"] = FakeAmdsmi(data["amdsmi"])
    return modules


def _commands(data: Mapping[str, Any]) -> dict[str, Done | None]:
    return {
        name: None
        if done is None
        else Done(int(done.get("code", 0)), done.get("output", ""), done.get("errors", ""))
        for name, done in (data.get("commands") or {}).items()
    }


def _time(text: Any) -> float | None:
    if text is None or isinstance(text, (int, float)):
        return text
    moment = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _change(
    machine: RecordedMachine, before: Mapping[str, Any], over: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Lay *over* on the node, and return what it is now."""
    if not over:
        return before
    now = merged(before, over)
    _lay(machine, over.get("files") or {})
    if "nvml" in over or "amdsmi" in over:
        machine.modules = _modules(now)
    machine.commands = _commands(now)
    machine.now = _time(now.get("time"))
    return now


@contextmanager
def machine_of(case: Case) -> Iterator[RecordedMachine]:
    """Return the case's node, in a temporary folder that goes with it."""
    data = case.data
    with tempfile.TemporaryDirectory(prefix="corpus-", dir=PLACE) as folder:
        machine = RecordedMachine(
            root=Path(folder),
            environ={key: str(value) for key, value in (data.get("environ") or {}).items()},
            modules=_modules(data),
            commands=_commands(data),
            now=_time(data.get("time")),
            answers=data.get("answers") or {},
            sync=data.get("sync", {"synced": True, "error_s": 0.001}),
            space=data.get("room"),
        )
        _lay(machine, data.get("files") or {})
        yield machine


# -- its verdict ------------------------------------------------------------------------------------------------------


def group_of(check: Check | LoadWatch) -> str:
    """Return the folder of a check's cases, from its name."""
    return next((group for group in GROUPS if check.name.startswith(group)), "host")


def named(name: str) -> Any:
    """Return the check or watch of this name."""
    return next(one for kind in every_check() for one in kind if one.name == name)


def context_of(case: Case, policy: Policy | None = None) -> Context:
    data = case.data
    policy = policy or our_policy()
    for key, values in (data.get("bounds") or {}).items():
        bound = policy.bounds.get(key) or Bound(key, "of the case", "the case")
        policy = policy.changed([dataclasses.replace(bound, **values)])
    return Context(
        policy=policy,
        wanted=ExpectedNode(**(data.get("wanted") or {})),
        host=data.get("host", "n1"),
        hosts=tuple(data.get("hosts") or ("n1",)),
        window_s=float(data.get("window_s", 86400.0)),
    )


def chosen(case: Case, checks: list[Check], watches: list[LoadWatch]) -> tuple[list[Check], list[LoadWatch]]:
    """Return what a case is for.

    Raises:
        ValueError: it names a check that does not exist.
    """
    names = case.data.get("checks")
    if names is not None:
        known = {one.name for group in every_check() for one in group}
        if unknown := set(names) - known:
            raise ValueError(f"{case.name}: no checks {sorted(unknown)}; there are {sorted(known)}")

    def wanted(check: Check | LoadWatch) -> bool:
        return check.name in names if names is not None else group_of(check) == case.group

    return [one for one in checks if wanted(one)], [one for one in watches if wanted(one)]


def _unknown(check: str, error: Unreadable) -> CheckOutcome:
    return CheckOutcome((Finding(check, Severity.UNKNOWN, str(error)),))


def _watch(
    case: Case, machine: RecordedMachine, context: Context, watches: list[LoadWatch]
) -> list[CheckOutcome]:
    """Return what each watch says; once one cannot read, that is all it says."""
    states: list[Any] = [None] * len(watches)
    unreadable: dict[int, CheckOutcome] = {}

    def step(action: Callable[[LoadWatch, Any], Any]) -> None:
        for place, watch in enumerate(watches):
            if place not in unreadable:
                try:
                    states[place] = action(watch, states[place])
                except Unreadable as error:
                    unreadable[place] = _unknown(watch.name, error)

    step(lambda watch, _: watch.start(machine, context))
    data = _change(machine, case.data, case.data.get("during"))
    for _ in range(SAMPLES):
        step(lambda watch, state: watch.sample(machine, state))
    _change(machine, data, case.data.get("after"))
    step(lambda watch, state: watch.end(machine, context, state))  # the last state is the outcome
    return [unreadable.get(place, state) for place, state in enumerate(states)]


def outcomes(
    case: Case,
    policy: Policy | None = None,
    checks: list[Check] | None = None,
    watches: list[LoadWatch] | None = None,
) -> list[CheckOutcome]:
    """Return what these checks and watches (default: all there are) say of a case, as the engine runs them."""
    every = every_check()
    looks, observers = chosen(
        case, list(every[0]) if checks is None else checks, list(every[1]) if watches is None else watches
    )
    context = context_of(case, policy)
    said: list[CheckOutcome] = []
    with machine_of(case) as machine:
        for check in looks:
            try:
                said.append(check.examine(machine, context))
            except Unreadable as error:
                said.append(_unknown(check.name, error))
        return said + _watch(case, machine, context, observers)


def findings(said: list[CheckOutcome]) -> list[Finding]:
    return [finding for outcome in said for finding in outcome.findings]


def rows(said: list[CheckOutcome]) -> list[Row]:
    """Return findings that are not PASS or INFO as ``Case.expected`` lists them."""
    return sorted(
        (one.check, one.severity.value, one.rule, one.device)
        for one in findings(said)
        if one.severity not in (Severity.PASS, Severity.INFO)
    )


class _AskedPolicy(Policy):
    """A policy that records what it was asked for."""

    def __init__(self, bounds: Iterable[Bound]) -> None:
        super().__init__(bounds)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Bound:
        self.asked.add(key)
        return super().__getitem__(key)


@functools.cache
def judged(case: Case) -> tuple[list[CheckOutcome], frozenset[str]]:
    """Return what all checks say of a case, and the keys of the policy that they ask for."""
    policy = _AskedPolicy(context_of(case).policy.bounds.values())
    plain = Case(case.name, case.group, {key: value for key, value in case.data.items() if key != "bounds"})
    return outcomes(plain, policy), frozenset(policy.asked)
