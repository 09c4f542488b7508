"""ReFrame's site configuration as entries of systems.yaml, and the list of what needs a person.

Open it when ``mlhpc init --from-reframe`` takes something over wrongly. The form is that of ReFrame 4.10
(reframe-hpc.readthedocs.io, "Configuration Reference"). A settings file in Python is a program: it is run by an interpreter of
its own, in which names that it imports from ReFrame stand for nothing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import yaml

from pytest_mlhpc.config.schema import MODULE
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.node.processes import run_to_end
from pytest_mlhpc.store.text import count

#: How long a settings file may run, in seconds.
LIMIT_S: Final = 30.0

#: What stands for a value that only ReFrame, or the machine, could have told.
UNKNOWN: Final = "UNKNOWN"

#: Runs a settings file and prints its ``site_configuration``. What it imports from ReFrame is any object, of any form.
_LOADER: Final = """
import importlib.abc, importlib.machinery, json, runpy, signal, sys, unittest.mock

signal.alarm(int(sys.argv[3]))  # it ends by itself where no test waits for it any more

class Any(unittest.mock.MagicMock):
    def __str__(self): return "UNKNOWN"
    __repr__ = __str__
    def __format__(self, spec): return "UNKNOWN"

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "reframe":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return None
    def exec_module(self, module):
        module.__getattr__ = lambda name: type(name, (), {}) if name[:1].isupper() else Any(name=name)
        module.__path__ = []

sys.meta_path.insert(0, Finder())
sys.path.insert(0, sys.argv[2])
found = runpy.run_path(sys.argv[1])
if "site_configuration" not in found: sys.exit("it defines no site_configuration")
json.dump(found["site_configuration"], sys.stdout, default=str)
"""

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
        parts = []
        for name, system in self.systems.items():
            asked = [one for one in self.questions if one.startswith(f"{name}:")]
            comments = "".join(f"# {one}\n" for one in (["what needs a person:", *asked] if asked else []))
            parts.append(
                comments + yaml.safe_dump({name: system}, sort_keys=False, width=110, allow_unicode=True)
            )
        return "\n".join(parts)


def read_settings(path: Path) -> Mapping[str, Any]:
    """Return the site configuration in *path*, a settings file in Python, YAML or JSON.

    Raises:
        UsageError: it cannot be read or run, or holds none.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if path.suffix in {".yaml", ".yml", ".json"}:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
    else:
        found = _run(path)
    if not isinstance(found, Mapping) or not isinstance(found.get("systems"), Sequence):
        raise UsageError(f"{path} describes no systems: it is no site configuration of ReFrame 4")
    return found


def _run(path: Path) -> Any:
    place = path.absolute()
    argv = [sys.executable, "-I", "-c", _LOADER, str(place), str(place.parent), str(math.ceil(LIMIT_S) + 1)]
    try:
        done = run_to_end(argv, LIMIT_S, cwd=path.absolute().parent)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{path} did not end within {LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(f"{path} cannot be run: {last[:300]}")
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise UsageError(f"{path} prints something of its own, or holds what is no data") from None


def convert(settings: Mapping[str, Any]) -> Conversion:
    """Return what systems.yaml has of *settings*. What cannot be taken over is a question; nothing is guessed in silence."""
    found = Conversion()
    environments = [one for one in settings.get("environments") or () if isinstance(one, Mapping)]
    for system in settings["systems"]:
        name = _name(system.get("name"))
        partitions = {}
        for partition in system.get("partitions") or ():
            made = _partition(found, name, system, partition, environments)
            if made:
                partitions[_name(partition.get("name"))] = made
        if partitions:
            about = {"description": str(system["descr"])} if system.get("descr") else {}
            found.systems[name] = {**about, "partitions": partitions}
    return found


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
    if features := [one for one in map(_name, given.get("features") or ()) if one]:
        made["features"] = list(dict.fromkeys(features))
    if isinstance(given.get("max_jobs"), int):
        made["max_jobs"] = max(1, min(given["max_jobs"], 10_000))
    if limit := _time(given.get("time_limit")):
        made["time_limit"] = limit
    made["environments"] = dict(_environments(found, place, system, given, environments, scheduler))
    for platform in given.get("container_platforms") or ():
        found.questions.append(
            f"{place}: containers by {platform.get('type')}: give an environment `container: {{runtime: ..., image: ...}}`"
        )
    return made


def _nodes(found: Conversion, place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``nodes`` and ``accelerator``. ReFrame knows neither memory nor how many nodes there are."""
    cores = (given.get("processor") or {}).get("num_cpus")
    nodes: dict[str, Any] = {
        "cores": cores if isinstance(cores, int) and cores > 0 else 1,
        "memory": "1GiB",
        "max": 2,
    }
    asked = ["memory of a node (%m of sinfo, in MB)", "how many nodes a job may have (max)"]
    if nodes["cores"] != cores:
        asked.insert(0, "cores of a node (%c of sinfo)")
    extra: dict[str, Any] = {"nodes": nodes}
    devices = [
        one for one in given.get("devices") or () if isinstance(one, Mapping) and one.get("type") == "gpu"
    ]
    if devices:
        kind = f"{devices[0].get('arch', '')} {devices[0].get('model', '')}".lower()
        amd = any(word in kind for word in ("gfx", "amd", "mi2", "mi3"))
        nodes |= {"devices": int(devices[0].get("num_devices") or 1)}
        nodes |= {"device_model": str(devices[0]["model"])} if devices[0].get("model") else {}
        extra["accelerator"] = "rocm" if amd else "cuda"
    elif "gpu" in [
        *(given.get("features") or ()),
        *(one.get("name") for one in given.get("resources") or ()),
    ]:
        asked.append("accelerator and devices of a node, as it has GPUs")
    found.questions.append(f"{place}: nodes: {'; '.join(asked)}")
    return extra


def _slurm(found: Conversion, place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under ``slurm:``: of ``access`` all, of ``resources``, which tests fill in, none."""
    made: dict[str, Any] = {}
    for option in map(str, given.get("access") or ()):
        key, value = _option(option)
        if UNKNOWN in option:
            found.questions.append(f"{place}: slurm: {option} is read by ReFrame; write its value")
        elif key in _KEYS and value:
            made[_KEYS[key]] = value
        elif key == "exclusive":
            made["exclusive"] = True
        elif key == "mem" and value in {"0", "0G"}:
            made["memory"] = "all"
        elif key in _OF_OURS:
            found.questions.append(f"{place}: slurm: {option}: {_OF_OURS[key]}")
        elif option.startswith(_OF_SRUN):
            made.setdefault("srun", []).append(option.replace(" ", "=", 1))
        else:
            made.setdefault("sbatch", []).append(option.replace(" ", "=", 1))
    for resource in given.get("resources") or ():
        options = " ".join(map(str, resource.get("options") or ()))
        found.questions.append(
            f"{place}: resource {resource.get('name')!r} ({options}): a test asks for such by slurm={{...}}"
        )
    return made


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
    names = [str(one) for one in given.get("environs") or ()] or ["default"]
    for name in names:
        one = _environment(name, place, environments)
        if one is None and name not in {"builtin", "default"}:
            known = nearest(name, [str(other.get("name")) for other in environments])
            found.questions.append(
                f"{place}: environment {name!r} is not described" + (f"; is it {known!r}?" if known else "")
            )
        levels = [level for level in (system, given, one) if level]
        made: dict[str, Any] = {}
        modules = [_module(module) for level in levels for module in level.get("modules") or ()]
        commands = [str(line) for level in levels for line in level.get("prepare_cmds") or ()]
        commands += [
            f"module load {shlex.quote(module)}" for module in modules if not re.fullmatch(MODULE, module)
        ]
        modules = [module for module in modules if re.fullmatch(MODULE, module)]
        variables = {
            str(key): str(value)
            for level in levels
            for key, value in _pairs(level.get("env_vars") or level.get("variables") or ())
        }
        for key in [key for key, value in variables.items() if UNKNOWN in value]:
            del variables[key]
            found.questions.append(
                f"{place}: environment {name}: the value of {key} is read by ReFrame; write it"
            )
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
                for target in map(str, one.get("target_systems") or ["*"])
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
    return [(pair[0], pair[1]) for pair in given if isinstance(pair, Sequence) and len(pair) == 2]


def _time(given: Any) -> str:
    """Return ``30m`` for ReFrame's ``0d0h30m0s``, an empty text for none."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(given or ""))
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return f"{max(1, total // 60)}m" if total else ""


def _name(given: Any) -> str:
    """Return a name that systems.yaml takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("-._")[:64] or "unnamed"
