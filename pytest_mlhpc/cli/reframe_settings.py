"""ReFrame's site configuration as entries of systems.yaml, and the list of what needs a person.

Open it when ``mlhpc init --from-reframe`` takes a system over wrongly. The form is that of ReFrame 4.10
(reframe-hpc.readthedocs.io, "Configuration Reference"). A settings file in Python is read, not run: see ``reframe_python.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from pytest_mlhpc.cli.reframe_python import MAX_FILE, Scope, follow_module, one_line, too_large, unknown_in
from pytest_mlhpc.config.schema import MODULE, EnvironmentModel
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.provision.slurm.schema import SlurmOptions
from pytest_mlhpc.store.text import count

_SCHEDULERS: Final = {"slurm": "slurm", "squeue": "slurm", "local": "local"}
_LAUNCHERS: Final = {
    "srun": "srun", "srunalloc": "srun", "mpirun": "mpirun", "mpiexec": "mpirun", "mpirun-openmpi": "mpirun", "local": "auto",
    "torchrun": "torchrun",
}  # fmt: skip
#: Options of sbatch that are keys of ``slurm:``.
_KEYS: Final = {
    "partition": "partition", "p": "partition", "account": "account", "A": "account", "qos": "qos", "q": "qos",
    "constraint": "constraint", "C": "constraint", "reservation": "reservation", "nodelist": "nodelist", "w": "nodelist",
    "exclude": "exclude", "x": "exclude", "licenses": "licenses", "L": "licenses", "gres": "gres",
}  # fmt: skip
#: Those that are said elsewhere -> where.
_OF_OURS: Final = {
    **dict.fromkeys(("gpus", "gpus-per-node", "G"), "say nodes: devices and the accelerator; jobs ask for what tests need"),
    **dict.fromkeys(("nodes", "N", "ntasks", "n", "ntasks-per-node", "cpus-per-task", "c"), "tests say nodes and ranks"),
    **dict.fromkeys(("time", "t"), "say time_limit"),
    **dict.fromkeys(("output", "o", "error", "e", "job-name", "J", "chdir", "D", "export"), "it is set for each job"),
    **dict.fromkeys(("clusters", "M"), "another cluster is another system"),
    "mem": "say slurm: memory",
}  # fmt: skip
#: Those that srun takes for each step, and that an mpirun of one's own must not get.
_OF_SRUN: Final = ("--hint", "--distribution", "--cpu-bind", "--mem-bind")


@dataclass
class Conversion:
    """The entries of systems.yaml by system, how much was taken over, and what needs a person, each with its place."""

    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  #: statements of the file that were not followed

    @property
    def partitions(self) -> int:
        """How many partitions were taken over."""
        return sum(len(system["partitions"]) for system in self.systems.values())

    @property
    def summary(self) -> str:
        """How much was taken over."""
        return f"{count(len(self.systems), 'system')} with {count(self.partitions, 'partition')} taken over"

    def text(self) -> str:
        """Return the entries as they stand below ``systems:``, the questions of each above it as comments."""
        parts = [_comments([*self.unread_questions, *self._asked(None)])]
        for name, system in self.systems.items():
            entry = yaml.safe_dump({name: system}, sort_keys=False, width=110, allow_unicode=True)
            parts.append(_comments(self._asked(name)) + entry)
        return "\n".join(part for part in parts if part)

    @property
    def unread_questions(self) -> list[str]:
        """What the file does that was not followed, as questions."""
        return [
            f"the settings were read, not run; compare by hand what this changes: {one}"
            for one in self.unread
        ]

    def _asked(self, system: str | None) -> list[str]:
        """Return the questions of *system*; None: of those that were left out whole."""
        places = [(one.partition(":")[0], one) for one in self.questions]
        return [
            one for place, one in places if place == system or (system is None and place not in self.systems)
        ]


def _comments(questions: Sequence[str]) -> str:
    lines = [one_line(one) for one in questions]
    return "".join(f"# {line}\n" for line in (["what needs a person:", *lines] if lines else []))


@dataclass(frozen=True)
class Settings:
    """A site configuration, and the statements of its file that were not followed though they may change it."""

    systems: Sequence[Mapping[str, Any]]
    environments: Sequence[Mapping[str, Any]]
    unread: Sequence[str] = ()

    @property
    def resources(self) -> dict[str, list[list[str]]]:
        """The options of the scheduler by the name of a resource, each form that some partition has once."""
        found: dict[str, list[list[str]]] = {}
        for system in self.systems:
            for partition in _mappings(system.get("partitions")):
                for resource in _mappings(partition.get("resources")):
                    options = [str(one) for one in _as_list(resource.get("options"))]
                    forms = found.setdefault(str(resource.get("name")), [])
                    forms += [options] if options not in forms else []
        return found


def read_settings(path: Path) -> Settings:
    """Return the site configuration in *path*, a settings file in Python, YAML or JSON. No Python is executed.

    Raises:
        UsageError: it cannot be read, or describes no systems; says how ReFrame itself prints what the file makes.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    unread: Sequence[str] = ()
    if path.suffix in {".yaml", ".yml", ".json"}:
        found = _read_data(path)
    else:
        _, scope = follow_module(path)
        found, unread = scope.names.get("site_configuration"), _touching(scope)
        if "site_configuration" not in scope.names:
            raise UsageError(f"{path} defines no site_configuration: it is no settings file of ReFrame 4")
    if isinstance(found, list) and found and isinstance(found[0], Mapping) and "partitions" in found[0]:
        found = {"systems": found}  # what `reframe --show-config=systems` prints
    systems = found.get("systems") if isinstance(found, Mapping) else None
    if too_large(found):
        raise UsageError(f"{path} holds more values than a site configuration has")
    if not isinstance(systems, list) or not any(isinstance(one, Mapping) for one in systems):
        raise UsageError(
            f"{path}: {_no_systems(systems, unread)}. {_PRINT.format(path=shlex.quote(str(path)))}"
        )
    return Settings(_mappings(systems), _mappings(found.get("environments")), unread)


_PRINT: Final = (
    "The file is read, not run. ReFrame prints what it makes of it, for one system at a time: "
    "reframe -C {path} --system NAME --show-config > NAME.json; give that file"
)


def _read_data(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE:
            raise UsageError(f"{path} has more than {MAX_FILE >> 20} MiB; it is no site configuration")
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _no_systems(systems: Any, unread: Sequence[str]) -> str:
    """Return why no systems are found."""
    if expression := unknown_in(systems):
        return f"the systems are made by `{expression}`"
    if unread:
        return f"the systems are made by statements: {unread[0]}"
    return "it describes no systems: it is no site configuration of ReFrame 4"


def _touching(scope: Scope) -> list[str]:
    """Return the statements that were not followed and mention the configuration, or a list or mapping of the file."""
    made = {name for name, value in scope.names.items() if isinstance(value, (dict, list))}
    return [f"line {one.line}: {one.text}" for one in scope.unread if one.names & made]


def _mappings(given: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in a list that a stranger wrote; anything else is left out."""
    return [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []


def convert(settings: Settings) -> Conversion:
    """Return what systems.yaml has of *settings*. What cannot be taken over is a question; nothing is guessed in silence."""
    found = Conversion()
    for system in settings.systems:
        name = _new_name(found, _name(system.get("name")))
        partitions = {}
        for partition in _mappings(system.get("partitions")):
            made = _partition(found, name, system, partition, settings.environments)
            if made:
                partitions[_name(partition.get("name"))] = made
        if unknown_in(system.get("partitions")) and not partitions:
            found.questions.append(f"{name}: its partitions are made by `{unknown_in(system['partitions'])}`")
        if partitions:
            descr = " ".join(str(system.get("descr") or "").split())[:200]
            about = {"description": descr} if descr and not unknown_in(descr) else {}
            found.systems[name] = {**about, "partitions": partitions}
    found.unread = list(settings.unread)
    return found


def _new_name(found: Conversion, name: str) -> str:
    """Return *name*, or one like it where another system has it: `local` is this machine."""
    if name != "local" and name not in found.systems:
        return name
    number = next(one for one in range(2, len(found.systems) + 3) if f"{name}-{one}" not in found.systems)
    found.questions.append(
        f"{name}-{number}: another system is called {name}; tests must name this one {name}-{number}"
    )
    return f"{name}-{number}"


def _listed(found: Conversion, place: str, what: str, given: Any) -> list[Any]:
    """Return the parts of *given* that are known. Of each other, ask; *what* names the list."""
    values = given if isinstance(given, (list, tuple)) else [given] if given else []
    for one in values:
        if expression := unknown_in(one):
            found.questions.append(
                f"{place}: {what}: `{expression}` is known to ReFrame alone; write its value"
            )
    return [one for one in values if not unknown_in(one)]


def _partition(
    found: Conversion,
    system_name: str,
    system: Mapping[str, Any],
    given: Mapping[str, Any],
    environments: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    place = f"{system_name}:{_name(given.get('name'))}"
    scheduler = _SCHEDULERS.get(str(given.get("scheduler")))
    if scheduler is None:
        found.questions.append(
            f"{place}: scheduler {given.get('scheduler')!r} is not served; the partition was left out"
        )
        return {}
    launcher = _LAUNCHERS.get(str(given.get("launcher")))
    if launcher is None:
        launcher = "srun" if scheduler == "slurm" else "auto"
        found.questions.append(
            f"{place}: launcher {given.get('launcher')!r} is not known; {launcher} was taken"
        )
    made: dict[str, Any] = {"scheduler": scheduler, "launcher": launcher}
    if scheduler == "slurm":
        made |= _nodes(found, place, given)
        made["slurm"] = _slurm(found, place, given)
    if features := [_name(one) for one in _listed(found, place, "features", given.get("features"))]:
        made["features"] = list(dict.fromkeys(features))
    if isinstance(given.get("max_jobs"), int):
        made["max_jobs"] = max(1, min(given["max_jobs"], 10_000))
    if limit := minutes(given.get("time_limit")):
        made["time_limit"] = limit
    made["environments"] = dict(_environments(found, place, system, given, environments, scheduler))
    for platform in _mappings(given.get("container_platforms")):
        found.questions.append(
            f"{place}: containers by {platform.get('type')}: give an environment `container: {{runtime: ..., image: ...}}`"
        )
    return made


def _nodes(found: Conversion, place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``nodes`` and ``accelerator``. ReFrame knows neither memory nor how many nodes there are."""
    processor = given.get("processor")
    cores = processor.get("num_cpus") if isinstance(processor, Mapping) else None
    nodes: dict[str, Any] = {
        "cores": cores if isinstance(cores, int) and cores > 0 else 1,
        "memory": "1GiB",
        "max": 2,
    }
    asked = ["memory of a node (%m of sinfo, in MB)", "how many nodes a job may have (max)"]
    if nodes["cores"] != cores:
        asked.insert(0, "cores of a node (%c of sinfo)")
    extra: dict[str, Any] = {"nodes": nodes}
    devices = [one for one in _mappings(given.get("devices")) if _is_gpu(one)]
    named = [
        *_as_list(given.get("features")),
        *(one.get("name") for one in _mappings(given.get("resources"))),
    ]
    if devices:
        kind = f"{devices[0].get('arch', '')} {devices[0].get('model', '')}".lower()
        amd = any(word in kind for word in ("gfx", "amd", "mi2", "mi3"))
        number, model = devices[0].get("num_devices"), str(devices[0].get("model") or "")
        nodes["devices"] = number if isinstance(number, int) and 0 < number <= 64 else 1
        if nodes["devices"] != number:
            asked.append("devices of a node")
        if model and not unknown_in(model):
            nodes["device_model"] = _name(model)
        extra["accelerator"] = "rocm" if amd else "cuda"
    elif any(str(one).lower() in {"gpu", "_rfm_gpu", "⟨features.gpu⟩"} for one in named):
        asked.append("accelerator and devices of a node, as it has GPUs")
    found.questions.append(f"{place}: nodes: {'; '.join(asked)}")
    return extra


def _is_gpu(device: Mapping[str, Any]) -> bool:
    return re.fullmatch(r"gpu|⟨\S*\bgpu⟩", str(device.get("type")).lower()) is not None


def _as_list(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else ()


def _slurm(found: Conversion, place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under ``slurm:``: of ``access`` all, of ``resources``, which tests fill in, none."""
    made: dict[str, Any] = {}
    for option in map(str, _listed(found, place, "slurm", given.get("access"))):
        if why := add_option(made, option):
            found.questions.append(f"{place}: slurm: {option}: {why}")
    for resource in _mappings(given.get("resources")):
        options = " ".join(map(str, _as_list(resource.get("options"))))
        found.questions.append(
            f"{place}: resource {resource.get('name')!r} ({options}): a test asks for such by slurm={{...}}"
        )
    return made


def add_option(made: dict[str, Any], option: str) -> str:
    """Add *option* of sbatch to *made*, options under ``slurm:``. Return why not, or an empty text."""
    key, value = _option(option)
    if key in _OF_OURS and not (key == "mem" and value in {"0", "0G"}):
        return _OF_OURS[key]
    if key in _KEYS and value:
        part: dict[str, Any] = {_KEYS[key]: value}
    elif key in {"exclusive", "mem"}:
        part = {"exclusive": True} if key == "exclusive" else {"memory": "all"}
    else:
        name = "srun" if option.startswith(_OF_SRUN) else "sbatch"
        part = {name: [*made.get(name, []), option.replace(" ", "=", 1)]}
    if why := _why_not(SlurmOptions, part):
        return why
    made |= part
    return ""


def _why_not(model: type[BaseModel], part: Mapping[str, Any]) -> str:
    """Return why *model*, of systems.yaml, does not take *part*, or an empty text."""
    try:
        model.model_validate(part)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return ""


def _option(option: str) -> tuple[str, str]:
    """Return name and value of an option of sbatch: ``--name=value``, ``--name value``, ``-Nvalue`` or ``-N value``."""
    if option.startswith("--"):
        name, _, value = option[2:].replace(" ", "=", 1).partition("=")
        return name, value.strip()
    return option[1:2], option[2:].strip()


def _environments(  # noqa: PLR0917 - the levels that ReFrame has
    found: Conversion,
    place: str,
    system: Mapping[str, Any],
    given: Mapping[str, Any],
    environments: Sequence[Mapping[str, Any]],
    scheduler: str,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the environments of a partition: what system, partition and environment set, in this order."""
    names = [str(one) for one in _listed(found, place, "environs", given.get("environs"))] or ["default"]
    for name in dict.fromkeys(names):
        one = _environment(name, place, environments)
        if one is None and name not in {"builtin", "default"}:
            known = nearest(name, [str(other.get("name")) for other in environments])
            text = f"{place.partition(':')[0]}: environment {name!r} is not described in this file"
            text += f"; is it {known!r}?" if known else ""
            found.questions += [text] if text not in found.questions else []
        levels = [level for level in (system, given, one) if level]
        made: dict[str, Any] = {}
        where = f"{place}: environment {name}"
        loaded = [
            _module(one) for level in levels for one in _listed(found, where, "modules", level.get("modules"))
        ]
        commands = [
            str(line)
            for level in levels
            for line in _listed(found, where, "prepare_cmds", level.get("prepare_cmds"))
        ]
        modules = [module for module in loaded if re.fullmatch(MODULE, module)]
        commands += [f"module load {shlex.quote(one)}" for one in loaded if one not in modules]
        variables = _variables(found, where, levels)
        if one and one.get("features"):
            features = ", ".join(map(str, _as_list(one["features"])))
            text = f"{system.get('name')}: environment {name} has features ({features}); here partitions have them"
            found.questions += [text] if text not in found.questions else []
        if scheduler == "slurm":
            made["python"] = "python3"
        elif modules or commands:
            found.questions.append(
                f"{place}: environment {name}: modules are not loaded on a partition without job script"
            )
        if modules and scheduler == "slurm":
            made["modules"] = modules
        if commands and scheduler == "slurm":
            made["setup"] = "\n".join(commands) + "\n"
        if variables:
            made["variables"] = {
                key: value.replace("{", "{{").replace("}", "}}") for key, value in variables.items()
            }
        yield _name(name), made


#: What ReFrame passes to a build -> the variable in which builds look for it.
_COMPILERS: Final = {"cc": "CC", "cxx": "CXX", "ftn": "FC", "nvcc": "NVCC"}


def _variables(found: Conversion, place: str, levels: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variables of system, partition and environment, later ones over earlier ones."""
    pairs = [
        (str(key), value)
        for level in levels
        for key, value in (
            *((variable, level[key]) for key, variable in _COMPILERS.items() if level.get(key)),
            *_pairs(level.get("env_vars") or level.get("variables") or ()),
        )
    ]
    variables: dict[str, str] = {}
    for key, value in pairs:
        if unknown_in(value):
            found.questions.append(
                f"{place}: the value of {key} is `{unknown_in(value)}`, known to ReFrame alone; write it"
            )
        elif why := _why_not(EnvironmentModel, {"variables": {key: str(value)}}):
            found.questions.append(f"{place}: the variable {key!r}: {why}")
        else:
            variables[key] = str(value)
    return variables


def _environment(
    name: str, place: str, environments: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the environment *name* that is for *place* (``system:partition``), as ReFrame chooses it: the nearest."""
    system = place.partition(":")[0]
    fitting = [
        (max(map(len, targets)), one)
        for one in environments
        if one.get("name") == name
        and (
            targets := [
                target
                for target in map(str, _as_list(one.get("target_systems")) or ["*"])
                if fnmatchcase(place, target) or target == system or fnmatchcase(system, target)
            ]
        )
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def _module(module: Any) -> str:
    return str(module.get("name")) if isinstance(module, Mapping) else str(module)


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    return [
        (pair[0], pair[1]) for pair in _as_list(given) if isinstance(pair, (list, tuple)) and len(pair) == 2
    ]


def minutes(given: Any) -> str:
    """Return ``30m`` for ReFrame's ``0d0h30m0s`` or 1800 (seconds), at least one minute; an empty text for none."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return f"{max(1, given // 60)}m"
    found = re.fullmatch(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", str(given or ""))
    days, hours, mins, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + mins) * 60 + seconds
    return f"{max(1, total // 60)}m" if total else ""


def _name(given: Any) -> str:
    """Return a name that systems.yaml takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("-._")[:64] or "unnamed"
