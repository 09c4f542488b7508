"""How ``--system NAME[:PARTITION]`` and ``--mlhpc-environment NAME`` select the targets that tests run on, from a systems.yaml that is read here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.config.build import (
    LOCAL,
    Findings,
    InstalledTypes,
    check_partition,
    maintenance_of,
    make_partition,
    put_variables,
    sorted_problems,
    split_options,
)
from pytest_mlhpc.config.model import Dataset, Maintenance, NodeType, Partition, System, Target
from pytest_mlhpc.config.quantities import parse_share
from pytest_mlhpc.config.schema import DatasetModel, MaintenanceModel, PartitionModel, SystemsFile
from pytest_mlhpc.config.systems_files import BUILT_IN, Tree, read_tree
from pytest_mlhpc.config.this_machine import LocalMachine, fingerprint, read_machine
from pytest_mlhpc.config.yaml import YamlNode, validate
from pytest_mlhpc.errors import ConfigError, Problem, UsageError, did_you_mean, nearest

if TYPE_CHECKING:
    from pytest_mlhpc.config.this_machine import Accelerators


@dataclass(frozen=True)
class SystemEntry:
    """A system as it was written, defaults merged in, variables not yet."""

    name: str
    node: YamlNode
    key: str
    source: Path

    @property
    def archived(self) -> bool:
        """Whether it renders and compares, but never runs."""
        return self.text("status") == "archived"

    @property
    def partitions(self) -> Mapping[str, YamlNode]:
        """Its partitions by name."""
        node = self.node.get("partitions")
        return dict(node.items()) if node is not None else {}

    def environments(self, partition: str) -> frozenset[str]:
        """Return the names of a partition's environments; one that names none has ``default``."""
        node = self.partitions[partition].get("environments")
        return frozenset(name for name, _ in node.items()) if node is not None else frozenset({"default"})

    def text(self, key: str) -> str:
        """Return the text under *key*, empty where there is none."""
        node = self.node.get(key)
        return node.value if node is not None and isinstance(node.value, str) else ""


@dataclass(frozen=True)
class LivePartition:
    """A partition that was asked for: built, or None with the ``reason`` why it cannot run here now."""

    name: str
    partition: Partition | None
    reason: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Systems:
    """All systems of a file (``entries``), and ``built_in`` ones that it does not define.

    A built-in system can be selected; a check of all systems leaves it out. ``machine`` and ``probe`` look at this
    machine, when a local partition is selected.
    """

    path: Path
    entries: Mapping[str, SystemEntry]
    types: InstalledTypes
    environ: Mapping[str, str] = field(repr=False)
    state_dir: Path | None = None
    machine: Callable[[], LocalMachine] = read_machine
    probe: Callable[[str, Path | None, Mapping[str, str]], Accelerators] | None = None
    built_in: Mapping[str, SystemEntry] = field(default_factory=dict)
    false_alarms: float = 1.0  #: losses a month that may fail a test falsely, all series of the site together

    @property
    def known(self) -> Mapping[str, SystemEntry]:
        """All systems that can be named."""
        return {**self.entries, **self.built_in}

    def maintenances(self) -> Iterator[tuple[str, str, Maintenance]]:
        """Yield each maintenance that the file tells of, with its system and partition."""
        for entry in self.entries.values():
            for name, partition in entry.partitions.items():
                node = partition.get("maintenance")
                items = node.value if node is not None else ()
                found = [validate(MaintenanceModel, item, lenient=True)[0] for item in items]
                for one in maintenance_of(filter(None, found)):
                    yield entry.name, name, one

    def select(self, name: str, environment: str | None = None) -> tuple[Target, ...]:
        """Return where tests run for ``--system NAME[:PARTITION]`` and ``--mlhpc-environment NAME|all``.

        A whole system gives every partition that is live and has the environment; without *environment* each
        partition's first one is taken.

        Raises:
            UsageError: the name is unknown, archived, or not live here; the text says why.
            ConfigError: a selected partition needs a variable that is not set, or is wrong once variables are put in.
        """
        system, _, wanted = name.partition(":")
        entry = self._entry(system)
        if entry.archived:
            since = f" (facts as of {entry.text('as_of')})" if entry.text("as_of") else ""
            raise UsageError(
                f"system {system!r} is archived{since}: its records can be compared, but nothing runs on it"
            )
        if ":" in name and wanted not in entry.partitions:
            raise UsageError(
                _unknown("partition", wanted, entry.partitions, f"{self.path}: system {system!r}")
            )
        chosen = [wanted] if ":" in name else list(entry.partitions)
        found, datasets = self._build(entry, chosen, environment)
        live = [part.partition for part in found if part.partition is not None]
        if not live:
            reasons = "; ".join(f"{system}:{part.name}: {part.reason}" for part in found)
            raise UsageError(f"{name!r} cannot run here: {reasons}")
        prints = {part.name: part.fingerprint for part in found}
        targets = [
            Target(partition, chosen_environment, datasets, prints[partition.name])
            for partition in live
            for chosen_environment in partition.environments
            if environment in {chosen_environment.name, "all"}
            or (environment is None and chosen_environment is partition.environments[0])
        ]
        if not targets:
            names = sorted({one.name for partition in live for one in partition.environments})
            raise UsageError(_unknown("environment", str(environment), names, f"{self.path}: {name!r}"))
        return tuple(targets)

    def every_target(self) -> tuple[tuple[Target, ...], Mapping[str, str]]:
        """Return all partitions of all live systems with each environment, and why each other partition is left out.

        A variable that is not set stays in the text as ``${NAME}``: nothing can be started there.

        Raises:
            ConfigError: like :meth:`select`, but for variables that are not set.
        """
        targets: list[Target] = []
        left_out: dict[str, str] = {}
        for entry in self.entries.values():
            if entry.archived:
                continue
            found, datasets = self._build(entry, list(entry.partitions), display=True)
            for one in found:
                if one.partition is None:
                    left_out[f"{entry.name}:{one.name}"] = one.reason
                    continue
                targets += [
                    Target(one.partition, environment, datasets, one.fingerprint)
                    for environment in one.partition.environments
                ]
        return tuple(targets), left_out

    def matters(self, system: str, partition: str) -> float | None:
        """Return the smallest loss that fails a test of a partition, a share of the level; None where it is the usual one.

        That is so, too, where the system is of another file, or a variable is not set, so that nothing can run there.
        """
        entry = self.known.get(system)
        node = entry.partitions.get(partition) if entry else None
        written = node.get("matters") if node else None
        if written is None:
            return None
        findings = Findings()
        value = put_variables(written, self.environ, findings).value
        return None if findings.missing else parse_share(value)

    def system(self, name: str, *, display: bool = False) -> tuple[System, Mapping[str, str]]:
        """Return the system called *name*, archived or live, and why each partition that is left out is not live.

        For *display*, a variable that is not set stays in the text as ``${NAME}``, and so does, as it may be a secret,
        every one in an environment's ``variables``.

        Raises:
            UsageError: no system has this name.
            ConfigError: like :meth:`select`, of all partitions.
        """
        entry = self._entry(name)
        found, datasets = self._build(entry, list(entry.partitions), display=display)
        system = System(
            name=name,
            description=entry.text("description"),
            partitions=tuple(part.partition for part in found if part.partition is not None),
            datasets=datasets,
            status="archived" if entry.archived else "live",
            as_of=entry.text("as_of"),
            source=str(entry.source),
        )
        return system, {part.name: part.reason for part in found if part.partition is None}

    def missing_variables(self) -> list[Problem]:
        """Return, for all live systems, the variables that are used and not set."""
        findings = Findings()
        for entry in self.entries.values():
            if not entry.archived:
                put_variables(entry.node, self.environ, findings)
        return sorted_problems(findings.missing)

    def _entry(self, name: str) -> SystemEntry:
        known = self.known
        if name not in known:
            other = Path.cwd() / "systems.yaml"  # where people look first; pytest's root may be elsewhere
            unread = other.is_file() and not (self.path.exists() and other.samefile(self.path))
            hint = (
                f"; {other} was not read: give {other} as mlhpc_systems_file, or to mlhpc as --systems-file"
                if unread
                else ""
            )
            from pytest_mlhpc.config.systems_files import known_names

            meant = "" if nearest(name, known) else nearest(name, known_names())
            if meant:
                asked = "" if meant == name else f"did you mean {meant!r}? "
                hint += f"; {asked}`mlhpc systems add {meant}` adds it"
            where = "there is no systems.yaml here" if self.path == BUILT_IN else str(self.path)
            raise UsageError(_unknown("system", name, known, where) + hint)
        return known[name]

    def _build(
        self, entry: SystemEntry, names: list[str], environment: str | None = None, *, display: bool = False
    ) -> tuple[list[LivePartition], Mapping[str, Dataset]]:
        findings = Findings()
        checked = []
        for name in names:
            node = put_variables(entry.partitions[name], self.environ, findings, secrets=not display)
            found, options = check_partition(
                node, self.types, findings, archived=entry.archived, lenient=bool(findings.missing)
            )
            checked.append((name, node, found, options))
        datasets = self._datasets(entry, findings)
        machine = (
            self.machine() if any(found and found.scheduler == LOCAL for _, _, found, _ in checked) else None
        )
        for _, node, found, _ in checked:
            if machine is not None and found is not None and found.scheduler == LOCAL and not entry.archived:
                findings.problems.extend(_beyond(machine, node, found))
        problems = sorted_problems(findings.problems) if display else findings.all()
        if problems:
            raise ConfigError(problems)
        live = [
            self._live(entry, name, found, options, machine=machine, environment=environment)
            if found is not None
            else LivePartition(name, None, "it needs variables that are not set")
            for name, _, found, options in checked
        ]
        return live, datasets

    def _live(
        self,
        entry: SystemEntry,
        name: str,
        found: PartitionModel,
        options: Mapping[str, Any],
        *,
        machine: LocalMachine | None,
        environment: str | None,
    ) -> LivePartition:
        """Build one checked partition; on this machine, find out what was not said, with *environment*'s torch."""
        asked = found.nodes
        nodes = NodeType(
            cores=(asked.cores if asked else None) or (machine.cores if machine else 1),
            memory=(asked.memory if asked else None) or (machine.memory if machine else 1),
            max=asked.max if asked else 1,
            devices=(asked.devices if asked else None) or 0,
            device_model=(asked.device_model if asked else None) or "",
            device_memory=(asked.device_memory if asked else None) or 0,
        )
        partition = make_partition(
            entry.name, name, found, options, nodes=nodes, accelerator=found.accelerator, source=entry.source
        )
        if found.scheduler != LOCAL or machine is None or entry.archived:
            return LivePartition(name, partition)
        if partition.accelerator in {"auto", "cuda", "rocm", "xpu"}:
            first, *others = partition.environments
            asked_of = next((other for other in others if other.name == environment), first)
            probed = self._probe(asked_of.python)
            if reason := _not_here(partition.accelerator, probed, nodes.devices):
                return LivePartition(name, None, reason)
            nodes = replace(nodes, devices=nodes.devices or len(probed.models), device_model=probed.model)
            partition = replace(partition, accelerator=probed.kind, nodes=nodes)
        return LivePartition(name, partition, fingerprint=fingerprint(machine, nodes))

    def _probe(self, python: str) -> Accelerators:
        if self.probe is not None:
            return self.probe(python, self.state_dir, self.environ)
        from pytest_mlhpc.config.this_machine import find_accelerators

        return find_accelerators(python, self.state_dir, self.environ)

    def _datasets(self, entry: SystemEntry, findings: Findings) -> Mapping[str, Dataset]:
        """Return the datasets; a relative path is relative to the file."""
        section = entry.node.get("datasets")
        datasets = {}
        for name, raw in section.items() if section is not None else ():
            node = put_variables(raw, self.environ, findings)
            found, problems = validate(DatasetModel, node, lenient=bool(findings.missing))
            findings.problems.extend(problems)
            if isinstance(found, DatasetModel):
                dataset = Dataset(name, **found.model_dump())
                datasets[name] = replace(dataset, path=str(entry.source.resolve().parent / found.path))
        return datasets


def _beyond(machine: LocalMachine, node: YamlNode, found: PartitionModel) -> list[Problem]:
    """Return what a local partition says that this machine does not have."""
    nodes = node.get("nodes")
    if found.nodes is None or nodes is None:
        return []
    problems = []
    for name in ("cores", "memory"):
        asked, has = getattr(found.nodes, name), getattr(machine, name)
        place = nodes.get(name)
        if asked is not None and place is not None and asked > has:
            problems.append(
                Problem(place.where, place.key, f"{asked:,} is more than this machine has: {has:,}")
            )
    return problems


def _not_here(wanted: str, probed: Accelerators, devices: int) -> str:
    """Return why a local partition with accelerators is not live, or an empty text."""
    if not probed.kind:
        return f"this machine has no accelerator: {probed.reason}"
    if wanted not in {"auto", probed.kind}:
        return f"this machine has {probed.kind} devices, not {wanted}"
    if devices > len(probed.models):
        return f"this machine has {len(probed.models)} devices, not {devices}"
    return ""


def _unknown(what: str, word: str, known: Collection[str], where: str) -> str:
    hint = did_you_mean(word, known)
    return f"{where}: unknown {what} {word!r}{hint}; known: {', '.join(known)}"


def load_systems(
    path: Path,
    *,
    schedulers: Mapping[str, type[Any] | None],
    environ: Mapping[str, str],
    launchers: Collection[str] | None = None,
    state_dir: Path | None = None,
) -> Systems:
    """Read and validate *path* and all that it includes.

    *schedulers* is what the hook ``mlhpc_schedulers`` returned, all answers in one mapping; *launchers* are the names of
    ``mlhpc_launchers`` if they are to be checked. *state_dir* keeps which accelerators were found since boot; without
    one it is found out each time. Variables are looked up in *environ* only when a partition is selected.

    ``local`` is always there: the built-in one, where no file has its own.

    Raises:
        ConfigError: with every problem of all files; nothing was written or started.
    """
    types = InstalledTypes(schedulers, launchers)
    tree = read_tree(path, schedulers)
    problems = list(tree.problems)
    rates: list[float] = []  # of the file itself before those of included ones
    for file in tree.files:
        systems = file.get("systems")
        if systems is not None and isinstance(systems.value, dict):
            own = {key: child for key, child in file.items() if key != "systems"}
            file = YamlNode(own, file.where, file.key)  # noqa: PLW2901 - its systems follow below, with their defaults
        model, found = validate(SystemsFile, file)
        problems.extend(found)
        if model is not None and "false_alarms" in model.model_fields_set:
            rates.append(model.false_alarms)
    if tree.files and not tree.systems and not problems:
        problems.append(Problem(str(path), "systems", "no system is defined"))
    entries = _entries(tree)
    for entry in entries.values():
        problems.extend(_problems_of(entry, types))
    if problems:
        raise ConfigError(sorted_problems(problems))
    others = _entries(read_tree(BUILT_IN, schedulers))
    built_in = {name: entry for name, entry in others.items() if name not in entries}
    return Systems(
        path, entries, types, environ, state_dir, built_in=built_in, false_alarms=next(iter(rates), 1.0)
    )


def _entries(tree: Tree) -> dict[str, SystemEntry]:
    return {
        name: SystemEntry(name, node, node.key, Path(tree.sources[name]))
        for name, node in tree.systems.items()
    }


def _problems_of(entry: SystemEntry, types: InstalledTypes) -> list[Problem]:
    """Return what is wrong with a system whatever its variables will be."""
    findings = Findings()
    node = put_variables(entry.node, {}, findings)
    partitions = node.get("partitions")
    stripped = node
    if partitions is not None and isinstance(partitions.value, dict):
        bare = {key: split_options(part, types)[0] for key, part in partitions.items()}
        stripped = YamlNode(
            {**node.value, "partitions": YamlNode(bare, partitions.where, partitions.key)},
            node.where,
            node.key,
        )
    root = YamlNode({"systems": YamlNode({entry.name: stripped}, node.where, "systems")}, node.where)
    findings.problems.extend(validate(SystemsFile, root, extra_keys=types.schedulers, lenient=True)[1])
    for _, part in partitions.items() if partitions is not None else ():
        check_partition(part, types, findings, archived=entry.archived, lenient=True)
    return findings.problems
