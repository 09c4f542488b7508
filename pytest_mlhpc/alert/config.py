"""``alerts.yaml``: which channels there are, which incidents each of them receives, and when a series counts as worse.

::

    branch: main                     # whose nightly runs are watched; default: the checkout's default branch, else main
    report: https://example.org/r    # named in messages
    stale_after: 26h
    rules: {recent: 14, smallest: 0.015}
    channels:
      operators:
        type: smtp                   # smtp, webhook, alertmanager, gitlab_issue, apprise
        kinds: [stale, nodes]        # default: all incidents; morning is the page of the night
        systems: [cirrus]            # default: all
        owners: ["@hpc/operators"]   # default: all, and what has no owner
        ...                          # what this type needs; ${NAME} is a variable of the environment

All that is wrong is said at once, with file and line; what a variable holds is never shown.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.alert.channels.base import AlertMessage, Channel, Kind
from pytest_mlhpc.alert.model import NIGHT_NS, Incident, owner_names
from pytest_mlhpc.alert.slower_series import Rules
from pytest_mlhpc.config.build import resolve
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.config.yaml import YamlNode, read_file
from pytest_mlhpc.errors import ConfigError, Problem, nearest

#: Types of channels that open what has to end.
_OF_INCIDENTS = frozenset({"alertmanager", "gitlab_issue"})
_TOP = ("branch", "report", "stale_after", "rules", "channels")


@dataclass(frozen=True)
class Route:
    """Which incidents a channel receives; empty is all. The page of a night goes to those that name it."""

    kinds: frozenset[Kind] = frozenset()
    systems: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()

    def takes(self, what: AlertMessage | Incident) -> bool:
        """Whether it receives this."""
        systems = set(
            what.systems if isinstance(what, Incident) else what.labels.get("system", "").split(",")
        )
        wanted = what.kind in self.kinds or (not self.kinds and what.kind is not Kind.MORNING)
        owned = not self.owners or bool(self.owners.intersection(owner_names(what.owners)))
        return wanted and owned and (not self.systems or bool(self.systems & systems))


@dataclass(frozen=True)
class Config:
    """What ``alerts.yaml`` says. ``channels`` and ``routes`` have the same names. An empty *branch* is the checkout's default."""

    branch: str = ""
    report: str = ""
    stale_ns: int = NIGHT_NS
    rules: Rules = field(default_factory=Rules)
    channels: Mapping[str, Channel] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)

    def takers(self, message: AlertMessage) -> Sequence[str]:
        """Return the names of the channels that receive *message*."""
        return [name for name, route in self.routes.items() if route.takes(message)]

    @property
    def takes_mornings(self) -> bool:
        """Whether a channel receives the page of a night."""
        return any(Kind.MORNING in route.kinds for route in self.routes.values())


def load(
    path: Path,
    environ: Mapping[str, str],
    types: Mapping[str, str],
    stand_in: Callable[[str], Channel] | None = None,
) -> Config:
    """Read *path*. Nothing is connected to. *types* names the module of each type of channel (``builtin.channel_types``).

    With *stand_in* each channel is what that makes of its name. No channel is opened then, and no secret is needed: variables
    stay as they are written, and settings of a type are not looked at.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong; lists every problem.
        UsageError: a package that a channel needs is not installed.
    """
    reader = _Reader(environ, types, stand_in)
    root = read_file(path, "channels")
    config = reader.config(root if stand_in else reader.resolved(root))
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def branch_and_report(path: Path) -> tuple[str, str]:
    """Return the branch that *path* says is watched, and the address of its HTML page.

    Both are empty where there is no such file, or it is not valid: `mlhpc alert send` says what is wrong with it.
    """
    try:
        root = read_file(path, "channels") if path.exists() else None
    except ConfigError:
        root = None
    nodes = [root.get(name) if root else None for name in ("branch", "report")]
    branch, report = [node.value if node and isinstance(node.value, str) else "" for node in nodes]
    return branch, report


class _Reader:
    """Reads on after a problem, to find all of them."""

    def __init__(
        self,
        environ: Mapping[str, str],
        types: Mapping[str, str],
        stand_in: Callable[[str], Channel] | None = None,
    ) -> None:
        self.environ = environ
        self.types = types
        self.stand_in = stand_in
        self.problems: list[Problem] = []

    def config(self, root: YamlNode) -> Config:
        self.unknown(root, _TOP)
        channels: dict[str, Channel] = {}
        routes: dict[str, Route] = {}
        for name, node in self.mapping(root.get("channels")):
            opened, route = self.channel(name, node)
            for channel in opened:
                channels[channel.name] = channel
                routes[channel.name] = route
        return Config(
            branch=self.text(root.get("branch"), ""),
            report=self.text(root.get("report"), ""),
            stale_ns=self.duration(root.get("stale_after"), NIGHT_NS),
            rules=self.rules(root.get("rules")),
            channels=channels,
            routes=routes,
        )

    def channel(self, name: str, node: YamlNode) -> tuple[Sequence[Channel], Route]:
        kinds = self.names(node.get("kinds"), [kind.value for kind in Kind])
        systems, owners = (frozenset(self.names(node.get(name), None)) for name in ("systems", "owners"))
        route = Route(frozenset(map(Kind, kinds)), systems, owners)
        type_node = node.get("type")
        module = self.types.get(type_node.value) if type_node and isinstance(type_node.value, str) else None
        if module is None:
            given = "is missing" if type_node is None else f"{type_node.plain()!r:.60} is no type of channel"
            hint = nearest(str(type_node.plain()), self.types) if type_node else ""
            where = type_node or node
            key = where.key if type_node else f"{node.key}.type"
            self.problems.append(
                Problem(where.where, key, f"{given}; there are {', '.join(self.types)}", hint)
            )
            return (), route
        if type_node and type_node.value in _OF_INCIDENTS and Kind.MORNING in route.kinds:
            text = f"{type_node.value} takes incidents alone, and a page of a night never ends; use smtp, webhook or apprise"
            self.problems.append(Problem(node.where, f"{node.key}.kinds", text))
        if self.stand_in:
            return (self.stand_in(name),), route
        opener = importlib.import_module(module)
        settings = self.settings(opener.Settings, node)
        return (opener.open_channels(name, settings) if settings is not None else ()), route

    def settings(self, cls: type[Any], node: YamlNode) -> Any:
        """Return an instance of a channel's settings, or None."""
        from pydantic import ConfigDict, create_model

        from pytest_mlhpc.config.yaml import validate

        common = {"type", "kinds", "systems", "owners"}
        rest = {key: child for key, child in node.items() if key not in common}
        hints = typing.get_type_hints(cls)
        fields: dict[str, Any] = {
            one.name: (hints[one.name], _default(one)) for one in dataclasses.fields(cls)
        }
        model = create_model(cls.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        found, problems = validate(model, dataclasses.replace(node, value=rest), extra_keys=common)
        self.problems += [_hidden(problem, rest, cls) for problem in problems]
        if found is None:
            return None
        try:
            return cls(**{name: getattr(found, name) for name in fields})
        except ValueError as error:
            self.problems.append(Problem(node.where, node.key, str(error)))
            return None

    def rules(self, node: YamlNode | None) -> Rules:
        found: dict[str, Any] = {}
        names = [one.name for one in dataclasses.fields(Rules)]
        for key, child in self.mapping(node):
            if key not in names:
                self.problems.append(Problem(child.where, child.key, "unknown key", nearest(key, names)))
                continue
            value, whole = child.value, key == "recent"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not value > 0
            ):
                text = f"should be a {'whole ' if whole else ''}number above 0"
                self.problems.append(Problem(child.where, child.key, text))
                continue
            found[key] = value
        return Rules(**found)

    def resolved(self, node: YamlNode) -> YamlNode:
        """Put variables in; remember what was written, as it is shown in place of the content."""
        if isinstance(node.value, dict):
            return dataclasses.replace(
                node, value={key: self.resolved(child) for key, child in node.value.items()}
            )
        if isinstance(node.value, list):
            return dataclasses.replace(node, value=[self.resolved(child) for child in node.value])
        if not isinstance(node.value, str) or "$" not in node.value:
            return node

        def missing(name: str) -> None:
            text = f"the variable {name} is not set"
            self.problems.append(Problem(node.where, node.key, text, nearest(name, self.environ)))

        def complain(message: str, suggestion: str) -> None:
            self.problems.append(Problem(node.where, node.key, message, suggestion))

        value = resolve(node.value, self.environ, missing=missing, complain=complain)
        return dataclasses.replace(node, value=value, written=node.value)

    def unknown(self, node: YamlNode, names: Sequence[str]) -> None:
        for key, child in node.items():
            if key not in names:
                self.problems.append(Problem(child.where, child.key, "unknown key", nearest(key, names)))

    def mapping(self, node: YamlNode | None) -> Sequence[tuple[str, YamlNode]]:
        if node is not None and not isinstance(node.value, dict):
            self.problems.append(Problem(node.where, node.key, "should be a mapping"))
        found = list(node.items()) if node is not None else []
        return [(key, child) for key, child in found]

    def text(self, node: YamlNode | None, default: str) -> str:
        if node is None:
            return default
        if not isinstance(node.value, str):
            self.problems.append(Problem(node.where, node.key, "should be text"))
            return default
        return node.value

    def duration(self, node: YamlNode | None, default: int) -> int:
        if node is None:
            return default
        try:
            return int(parse_duration(node.value) * 1e9)
        except ValueError as error:
            self.problems.append(Problem(node.where, node.key, str(error)))
            return default

    def names(self, node: YamlNode | None, valid: Sequence[str] | None) -> list[str]:
        if node is None:
            return []
        children = node.value if isinstance(node.value, list) else [node]
        found = []
        for child in children:
            if not isinstance(child.value, str) or not child.value:
                self.problems.append(Problem(child.where, child.key, "should be a word or a list of words"))
            elif valid is not None and child.value not in valid:
                text = f"{child.value!r:.60} is not one of {', '.join(valid)}"
                self.problems.append(Problem(child.where, child.key, text, nearest(child.value, valid)))
            else:
                found.append(child.value)
        return found


def _default(one: dataclasses.Field[Any]) -> Any:
    """Return a field's default as pydantic wants it."""
    from pydantic import Field

    if one.default is not dataclasses.MISSING:
        return one.default
    if one.default_factory is not dataclasses.MISSING:
        return Field(default_factory=one.default_factory)
    return ...


def _hidden(problem: Problem, given: Mapping[str, YamlNode], cls: type[Any]) -> Problem:
    """Return *problem* without the value of a secret, which may stand in the file itself."""
    secrets = {one.name for one in dataclasses.fields(cls) if not one.repr}
    name = problem.key.rpartition(".")[2]
    value = str(given[name].value) if name in secrets and name in given else ""
    shown = value and any(part in problem.message for part in (value, repr(value)[:60]))
    return dataclasses.replace(problem, message="is not valid (its value is not shown)") if shown else problem
