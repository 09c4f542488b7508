"""The files of a new project: a suite, systems.yaml, baselines/, a CI job. None that is there is written over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_mlhpc.cli.project.surroundings import SlurmPartition, Surroundings
from pytest_mlhpc.config.files import BUILT_IN, known_text, with_system
from pytest_mlhpc.store.files import replace_file

_TEXTS: Final = Path(__file__).with_name("texts")
#: Other files in which pytest finds its settings; a pytest.ini would hide them.
_SETTINGS: Final = ("pyproject.toml", "tox.ini", "setup.cfg", "pytest.toml", ".pytest.toml", ".pytest.ini")
#: Of one run, in seconds, where the partition allows twice as much: a job needs a margin beside its run.
_TIME_LIMIT_S: Final = 1800


def project_files(surroundings: Surroundings) -> dict[str, str]:
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
