"""``mlhpc data``: synthetic sets in the real formats, whether a system's sets are right, and what can be trained.

Nothing of torch, NumPy, h5py or Pillow is imported before a set is made.

Counting needs torch, which the controller never imports: :mod:`pytest_mlhpc.node.worker.workloads.catalogue` does it in a process of its
own, with the interpreter that ``--python`` names.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NounGroup
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.worker.data.dataset_files import DataError
from pytest_mlhpc.store.text import table

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Dataset

#: Training samples to one validation sample, as MLPerf HPC splits its sets.
SPLIT = 8
_MOST = 10**8


@click.group(
    cls=NounGroup,
    help="Data sets: make synthetic ones, check those of systems.yaml, and list the workloads that read them.",
    example="mlhpc data make cosmoflow /scratch/cosmoflow --samples 512",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    cls=DataCommand,
    help="Write a synthetic set in the format of WORKLOAD's real one to DIR, a new or empty folder.",
    example="mlhpc data make cosmoflow /scratch/cosmoflow --samples 512 --format tfrecord",
)
@click.argument("workload")
@click.argument("folder", metavar="DIR", type=Path)
@click.option(
    "--samples", metavar="N", type=click.IntRange(1, _MOST), required=True, help="Samples for training."
)
@click.option(
    "--validation",
    metavar="N",
    type=click.IntRange(0, _MOST),
    help=f"Samples beside them.  [default: 1 to {SPLIT}]",
)
@click.option("--preset", default="reference", metavar="NAME", show_default=True, help="Size of a sample.")
@click.option(
    "--format", "form", default="", metavar="NAME", help="cosmoflow: tfrecord-gzip, tfrecord, hdf5."
)
@click.option(
    "--learnable", is_flag=True, help="Samples from which a small model learns its task in seconds."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    show_default=True,
    help="Equal seeds, equal files.",
)
def make(
    *,
    workload: str,
    folder: Path,
    samples: int,
    validation: int | None,
    preset: str,
    form: str,
    learnable: bool,
    seed: int,
) -> CommandReport:
    """Make a set."""
    with _usage_errors():
        return _make(
            workload,
            preset,
            folder,
            samples=samples,
            validation=samples // SPLIT if validation is None else validation,
            seed=seed,
            form=form,
            learnable=learnable,
        )


@command.command(
    cls=DataCommand,
    help="Compare `datasets:` of systems.yaml with what is there: files, bytes, a digest. Exit code 1 if they differ.",
    example="mlhpc data check --system local",
)
@click.option("--system", metavar="NAME", help="Only this system.")
@options.systems_file
def check(system: str | None, systems_file: str | None) -> CommandReport:
    """Check each set."""
    systems = options.chosen_systems(systems_file)
    names = [system] if system else list(systems.entries)
    with _usage_errors():
        sets = [
            _checked(name, dataset)
            for name in names
            for dataset in systems.system(name, display=True)[0].datasets.values()
        ]
    text = "".join(map(_text, sets))
    if not sets:
        where = f" named {system}" if system else ""
        text = f"no system{where} has `datasets:`; nothing was checked\n"
    return CommandReport(text, {"sets": sets}, 1 if any(one["problems"] for one in sets) else 0)


@command.command(
    cls=DataCommand,
    help="List what can be trained: workloads, presets, variants, and what one sample of each costs.",
    example="mlhpc data workloads",
)
@click.option(
    "--python",
    default=sys.executable,
    metavar="PROGRAM",
    help="Interpreter that has torch.  [default: this one]",
)
def workloads(python: str) -> CommandReport:
    """Return the table; exit code 1 where sizes could not be counted."""
    from pytest_mlhpc.builtin import make_manager
    from pytest_mlhpc.node.worker.workloads.catalogue import requests

    known = [entry for group in make_manager().hook.mlhpc_workloads() for entry in group]
    rows, problem = describe_workloads(python, requests(sorted(known, key=lambda entry: entry.name)))
    others = [f"\n{entry.name}: {entry.summary}\n" for entry in known if entry.probe or not entry.module]
    failed = [f"{row['workload']} ({row['preset']}): {row['error']}" for row in rows if "error" in row]
    problems = [problem, *failed] if problem else failed
    sys.stderr.writelines(f"mlhpc data workloads: {one}\n" for one in problems)
    return CommandReport(
        f"{workload_table(rows)}\n{''.join(others)}", {"workloads": rows}, 1 if problems else 0
    )


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn what a set cannot be, and a missing package, into usage errors."""
    try:
        yield
    except DataError as error:
        raise UsageError(str(error)) from error
    except ImportError as error:
        raise UsageError(f"{error.name} is needed: pip install 'pytest-mlhpc[torch]'") from error


def _make(workload: str, preset: str, folder: Path, **wanted: Any) -> CommandReport:
    from pytest_mlhpc.node.worker.data.dataset_files import layout_of
    from pytest_mlhpc.node.worker.data.make import make_set

    layout = layout_of(workload, _parameters(workload, preset), **wanted)
    manifest, made = make_set(layout, folder.absolute(), _progress if sys.stderr.isatty() else None)
    mean = manifest.bytes / manifest.files
    text = (
        f"{folder}: {layout.workload}, {layout.format}, {manifest.files} files, {manifest.bytes} bytes,"
        f" {mean / 1e6:.3f} MB a file{'' if made else ' (was there already, complete)'}\n"
    )
    data = {
        "folder": str(folder),
        "workload": layout.workload,
        "format": layout.format,
        "files": manifest.files,
        "bytes": manifest.bytes,
        "made": made,
    }
    return CommandReport(text, data)


def _parameters(workload: str, preset: str) -> dict[str, Any]:
    """Return the workload's fields under *preset*."""
    from pytest_mlhpc.builtin import make_manager
    from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

    known = {entry.name: entry for group in make_manager().hook.mlhpc_workloads() for entry in group}
    if workload not in known:
        raise UsageError(_unknown("workload", workload, nearest(workload, known), sorted(known)))
    presets = known[workload].presets
    if preset not in presets:
        raise UsageError(_unknown("preset", preset, nearest(preset, presets), sorted(presets)))
    return parameters_of(known[workload], preset)


def _unknown(what: str, word: str, suggestion: str, known: list[str]) -> str:
    hint = f" (did you mean {suggestion!r}?)" if suggestion else ""
    return f"there is no {what} {word!r}{hint}; there are: {', '.join(known)}"


def _progress(done: int, total: int) -> None:
    """Show how far it is, on one line of a terminal."""
    sys.stderr.write(f"\r{done}/{total} samples{chr(10) if done == total else ''}")
    sys.stderr.flush()


def _checked(system: str, dataset: Dataset) -> dict[str, Any]:
    """Return what one entry came to."""
    from pytest_mlhpc.node.worker.data.dataset_files import check_set

    about = {"system": system, "name": dataset.name, "path": dataset.path}
    try:
        found = check_set(
            dataset.path, dataset.kind, files=dataset.files, size=dataset.bytes, sha256=dataset.digest
        )
    except DataError as error:
        return {**about, "problems": [error.message]}
    measured = {
        "files": found.files,
        "bytes": found.bytes,
        "digest": found.digest,
        "declared": dataset.digest,
    }
    return {**about, "problems": list(found.problems), **measured}


def _text(one: dict[str, Any]) -> str:
    where = f"{one['system']}: {one['name']}: {one['path']}"
    if one["problems"]:
        return "".join(f"{where}: {problem}\n" for problem in one["problems"])
    unclaimed = "" if one["declared"] else f"; for systems.yaml: digest: sha256:{one['digest']}"
    return f"{where}: ok, {one['files']} files, {one['bytes']} bytes{unclaimed}\n"


#: Importing torch from a cold network file system takes a minute; counting takes seconds.
TIME_LIMIT_S = 300.0

_COLUMNS = ("workload", "preset", "variant", "input", "parameters", "forward", "training")


def describe_workloads(python: str, asked: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows with their sizes, or as they were, and why they could not be counted."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    try:
        ended = subprocess.run(
            [python, "-m", "pytest_mlhpc.node.worker.workloads.catalogue", "-"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        return asked, f"sizes unknown: cannot start {python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return asked, f"sizes unknown: {python} did not answer within {TIME_LIMIT_S:.0f} s"
    if ended.returncode == 0:
        try:
            return read_json(ended.stdout), ""
        except ValueError:
            return asked, f"sizes unknown: {python} printed something that is no JSON: {ended.stdout[:200]!r}"
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    if "No module named 'torch'" in last:
        return asked, (
            f"sizes unknown: {python} has no torch. Install pytest-mlhpc[torch], or name an interpreter that has it "
            "with --python"
        )
    return asked, f"sizes unknown: {python} ended with code {ended.returncode}: {last}"


def workload_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as aligned text; a size that is not known is ``-``."""
    text = table([_COLUMNS, *map(_cells, rows)], right=range(4, len(_COLUMNS)))
    return f"{text}\nforward, training: operations of one sample; a multiply-add is two"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["workload"], row["preset"], row["variant"] or "-")
    if "model_parameters" not in row:
        return (*names, "-", "-", "-", "-")
    shape = "x".join(map(str, row["input_shape"])) + f" {row['input_type']}"
    return (
        *names,
        shape,
        f"{row['model_parameters']:,}",
        _flop(row["forward_flop"]),
        _flop(row["train_flop"]),
    )


def _flop(operations: float) -> str:
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if operations >= factor:
            return f"{operations / factor:,.3f} {unit}"
    return f"{operations / 1e6:,.3f} MFLOP"
