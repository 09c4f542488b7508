"""``mlhpc init``: the files with which a project begins."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.config.systems_files import BUILT_IN, known_text, with_system
from pytest_mlhpc.store.locations import replace_file


class InitCommand(DataCommand):
    """A command with an option that takes one value or two."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give ``--from-reframe SETTINGS`` the suite that it lacks: click's options take a fixed number of values."""
        given = [
            part
            for one in args
            for part in (one.split("=", 1) if one.startswith("--from-reframe=") else [one])
        ]
        if "--from-reframe" in given:
            place = given.index("--from-reframe") + 2
            if not [one for one in given[place - 1 : place] if one and not one.startswith("-")]:
                ctx.fail(
                    "--from-reframe takes SETTINGS, a settings file of ReFrame, and SUITE if its tests are wanted"
                )
            if place == len(given) or given[place].startswith("-"):
                given.insert(place, "")
        return super().parse_args(ctx, given)


@click.command(
    cls=InitCommand,
    help="Write a first suite, systems.yaml, baselines/ and a CI job into FOLDER. No file that is there is changed.",
    example="mlhpc init benchmarks\nmlhpc init benchmarks --from-reframe settings.py tests/",
)
@click.argument("folder", type=Path, default=Path())
@click.option(
    "--from-reframe",
    nargs=2,
    metavar="SETTINGS [SUITE]",
    help="Take over systems from ReFrame's site configuration, and of each test class in SUITE a stub. No Python is run.",
)
def command(folder: Path, from_reframe: tuple[str, str] | None) -> CommandReport:
    """Write what the folder lacks, and say what can be done next."""
    surroundings = find_machine(os.environ)
    files = project_files(surroundings)
    notes: list[str] = []
    questions: list[str] = []
    if from_reframe is not None:
        taken, notes, questions = _from_reframe(Path(from_reframe[0]), from_reframe[1], folder)
        files |= taken
    written, there = write_project(folder, files)
    lines = [f"wrote {name}" for name in written] + [f"{name} is there and was not changed" for name in there]
    first = "suites/test_first.py " if from_reframe is not None and from_reframe[1] else ""
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    lines.append(f"next: {change}pytest {first}--system local")
    if from_reframe is not None and "systems.yaml" in there:
        lines.append("systems.yaml is there already: no system was taken over")
    lines += notes
    stubs = {str(Path(name).parent) for name in files if "/from_reframe/" in name}
    lines += [f"next, for the stubs: {change}pytest {folder_of} --system NAME" for folder_of in sorted(stubs)]
    if from_reframe is None and "systems.yaml" in written and surroundings.slurm:
        lines.append("once the questions in systems.yaml are answered: pytest --system cluster")
    if "systems.yaml" in written and surroundings.kubernetes:
        lines.append("once the variables of systems.yaml are set: pytest --system kubernetes")
    data = {"folder": str(folder), "written": written, "there": there, "questions": questions}
    return CommandReport("".join(f"{line}\n" for line in lines), data)


def _from_reframe(settings: Path, suite: str, folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Return files by their paths in *folder*, lines about them, and all questions.

    Raises:
        UsageError: the settings or the suite cannot be read.
    """
    from pytest_mlhpc.cli.reframe_settings import convert, read_settings

    read = read_settings(settings)
    taken = convert(read)
    questions = [*taken.unread_questions, *taken.questions]
    notes = [f"{taken.summary}; what needs a person:" if questions else taken.summary]
    notes += [f"  {one}" for one in questions]
    files = {"systems.yaml": with_systems(taken.text())}
    if suite:
        from pytest_mlhpc.cli.reframe_stubs import summary, write_stubs
        from pytest_mlhpc.cli.reframe_suite import read_suite

        found = read_suite(Path(suite))
        stubs, made = write_stubs(found, Path(suite), folder, taken.systems, read.resources)
        files |= stubs
        notes += summary(found, made)
        questions += [f"{one.test.name}: {asked.text}" for one in made for asked in one.questions]
    return files, notes, questions


#: Partition, nodes, CPUs and MiB of a node, generic resources, longest time (sinfo(1), --format).
_SINFO: Final = ("sinfo", "--noheader", "--format=%R|%D|%c|%m|%G|%l")
_LINE: Final = re.compile(r"([\w.-]+)\|(\d+)\|(\d+)\+?\|(\d+)\+?\|([^|]*)\|([^|]*)")
_LIMIT_S: Final = 30


@dataclass(frozen=True)
class SlurmPartition:
    """A partition as sinfo describes it, with the least that each of its nodes has."""

    name: str
    nodes: int
    cores: int
    memory_mib: int
    devices: int = 0
    device_model: str = ""
    max_time_s: int = 0  #: 0: no limit


@dataclass(frozen=True)
class MachineSurroundings:
    """What the machine has."""

    torch: bool = False
    slurm: tuple[SlurmPartition, ...] = ()
    kubernetes: bool = False


def find_machine(environ: Mapping[str, str]) -> MachineSurroundings:
    """Return what this machine has."""
    config = environ.get("KUBECONFIG") or str(Path(environ.get("HOME", "/"), ".kube/config"))
    try:
        done = subprocess.run(
            _SINFO, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
        answer = done.stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    return MachineSurroundings(
        torch=importlib.util.find_spec("torch") is not None,
        slurm=partitions_of(answer),
        kubernetes=any(Path(part).is_file() for part in config.split(":") if part),
    )


def partitions_of(answer: str) -> tuple[SlurmPartition, ...]:
    """Return the partitions that sinfo listed. It has a line for each kind of node in a partition."""
    found: dict[str, SlurmPartition] = {}
    for match in map(_LINE.fullmatch, answer.split("\n")):
        if match is None:
            continue
        one = _partition(match)
        other = found.get(one.name)
        found[one.name] = one if other is None else _least(one, other)
    return tuple(found.values())


def _partition(line: re.Match[str]) -> SlurmPartition:
    name, nodes, cores, memory, resources, limit = line.groups()
    gpu = re.search(r"\bgpu:(?:([A-Za-z][\w.-]*):)?(\d+)", resources)
    devices, model = (int(gpu[2]), gpu[1] or "gpu") if gpu else (0, "")
    return SlurmPartition(name, int(nodes), int(cores), int(memory), devices, model, _seconds(limit))


def _least(one: SlurmPartition, other: SlurmPartition) -> SlurmPartition:
    """Return what all nodes have of a partition with two kinds of nodes."""
    return replace(
        min(one, other, key=lambda part: part.devices),
        nodes=one.nodes + other.nodes,
        cores=min(one.cores, other.cores),
        memory_mib=min(one.memory_mib, other.memory_mib),
    )


def _seconds(limit: str) -> int:
    """Return the seconds of days-hours:minutes:seconds, of which the first ones may be absent; 0 for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


_TEXTS: Final = Path(__file__).with_name("texts")
#: Other files in which pytest finds its settings; a pytest.ini would hide them.
_SETTINGS: Final = ("pyproject.toml", "tox.ini", "setup.cfg", "pytest.toml", ".pytest.toml", ".pytest.ini")
#: Of one run, in seconds, where the partition allows twice as much: a job needs a margin beside its run.
_TIME_LIMIT_S: Final = 1800


def project_files(surroundings: MachineSurroundings) -> dict[str, str]:
    """Return the texts of all files of a new project by their paths."""
    systems = _text("systems.yaml") + BUILT_IN.read_text(encoding="utf-8").partition("schema: 1\n")[2]
    if surroundings.slurm:
        systems = with_system(systems, _text("cluster.yaml") + "".join(map(_entry, surroundings.slurm)))
    if surroundings.kubernetes:
        systems = with_system(systems, known_text("kubernetes"))
    training = _text("training.py.txt")
    if not surroundings.torch:
        commented = "".join(f"# {line}".rstrip() + "\n" for line in training.splitlines())
        training = (
            f"# pip install 'pytest-mlhpc[torch]', and remove the first `# ` of what follows.\n{commented}"
        )
    return {
        "suites/test_first.py": _text("test_first.py.txt") + training,
        "systems.yaml": systems,
        "baselines/.gitkeep": "",
        "pytest.ini": "[pytest]\ntestpaths = suites\n",
        ".gitlab-ci.yml": _text("gitlab-ci.yml"),
        ".gitignore": "__pycache__/\n.pytest_cache/\n.benchmarks/\n.mlhpc/\njunit.xml\n",
    }


def with_systems(entries: str) -> str:
    """Return the text of systems.yaml with this machine and *entries*, as they stand below ``systems:``."""
    text = _text("systems.yaml") + BUILT_IN.read_text(encoding="utf-8").partition("schema: 1\n")[2]
    return text.rstrip() + "\n\n" + textwrap.indent(entries, "  ")


def write_project(folder: Path, files: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Write those of *files* that *folder* lacks. Return which were written, and which were there already.

    Raises:
        StoreError: one cannot be written; names it.
    """
    written: list[str] = []
    there: list[str] = []
    others = [name for name in _SETTINGS if (folder / name).exists()]
    for name, text in files.items():
        path = folder / name
        if path.exists() or (name == "pytest.ini" and others):
            there += others if name == "pytest.ini" and others else [name]
            continue
        replace_file(path, text)  # whole or not at all: what a killed writer began is no file that is there
        written.append(name)
    return written, there


def _entry(part: SlurmPartition) -> str:
    """Return a partition of systems.yaml."""
    devices = f", devices: {part.devices}, device_model: {part.device_model}" if part.devices else ""
    limit = f", max_time: {part.max_time_s}s" if part.max_time_s else ""
    return _text("partition.yaml").format(
        name=part.name,
        accelerator="cuda # or rocm, or xpu" if part.devices else "cpu",
        nodes=f"cores: {part.cores}, memory: {part.memory_mib}MiB, max: {part.nodes}{devices}",
        time_limit=min(_TIME_LIMIT_S, part.max_time_s // 2 or _TIME_LIMIT_S),
        slurm=f'partition: {part.name}, account: "${{MLHPC_ACCOUNT}}"{limit}',
    )


def _text(name: str) -> str:
    return (_TEXTS / name).read_text(encoding="utf-8")
