"""``mlhpc data make|check``: synthetic sets in the real formats, and whether a system's sets are what they should be.

The controller's part: nothing of torch, NumPy, h5py or Pillow is imported before a set is made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.worker.data.errors import DataError

if TYPE_CHECKING:
    from pytest_mlhpc.system.model import Dataset

SUMMARY = "make synthetic data sets, check those of a system"
#: Training samples to one validation sample, as MLPerf HPC splits its sets.
SPLIT = 8


def _count(text: str) -> int:
    """Return a number of samples."""
    value = int(text)
    if not 0 <= value <= 10**8:
        raise ValueError(text)
    return value


def _samples(text: str) -> int:
    value = _count(text)
    if not value:
        raise ValueError(text)
    return value


_count.__name__ = _samples.__name__ = "number of samples"  # what argparse calls a value that does not fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``make WORKLOAD --samples N DIR`` and ``check``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="make|check")
    make = actions.add_parser("make", help="write a synthetic set in the format of the real one")
    make.add_argument("workload", metavar="WORKLOAD", help="cosmoflow, deepcam, resnet50")
    make.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    make.add_argument("--samples", metavar="N", type=_samples, required=True, help="samples for training")
    make.add_argument("--validation", metavar="N", type=_count, help=f"samples beside them (1 to {SPLIT})")
    make.add_argument("--preset", default="reference", metavar="NAME", help="size of a sample (reference)")
    make.add_argument("--format", default="", metavar="NAME", help="cosmoflow: tfrecord-gzip, tfrecord, hdf5")
    make.add_argument(
        "--learnable", action="store_true", help="samples from which a small model learns its task in seconds"
    )
    make.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds, equal files (0)")
    check = actions.add_parser("check", help="compare `datasets:` with what is there: files, bytes, a digest")
    check.add_argument("--system", metavar="NAME", help="only this system")
    check.add_argument("--systems-file", metavar="FILE", help="default: systems.yaml of this folder")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 0; 1 when a set is not what it should be; 4 when it was asked wrongly. Reasons go to stderr."""
    from pytest_mlhpc.errors import UsageError

    try:
        return _make(args) if args.action == "make" else _check(args)
    except (UsageError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return 4
    except ImportError as error:
        sys.stderr.write(f"{error.name} is needed: pip install 'pytest-mlhpc[torch]'\n")
        return 4


def _make(args: argparse.Namespace) -> int:
    from pytest_mlhpc.worker.data.layout import layout_of

    if args.seed < 0:
        raise DataError("--seed", f"{args.seed} is negative")
    validation = args.samples // SPLIT if args.validation is None else args.validation
    layout = layout_of(
        args.workload,
        _parameters(args.workload, args.preset),
        samples=args.samples,
        validation=validation,
        seed=args.seed,
        form=args.format,
        learnable=args.learnable,
    )
    from pytest_mlhpc.worker.data.make import make_set

    manifest, made = make_set(layout, args.folder.absolute(), _progress if sys.stderr.isatty() else None)
    mean = manifest.bytes / manifest.files
    _say(
        f"{args.folder}: {layout.workload}, {layout.format}, {manifest.files} files, {manifest.bytes} bytes,"
        f" {mean / 1e6:.3f} MB a file{'' if made else ' (was there already, complete)'}"
    )
    return 0


def _parameters(workload: str, preset: str) -> dict[str, Any]:
    """Return the workload's fields under *preset*."""
    from pytest_mlhpc.errors import UsageError, nearest
    from pytest_mlhpc.plugins import make_manager
    from pytest_mlhpc.worker.workloads.catalogue import parameters_of

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


def _check(args: argparse.Namespace) -> int:
    bad = seen = 0
    for system, dataset in _datasets(args):
        seen += 1
        bad += not _one(system, dataset)
    if not seen:
        _say(
            f"no system{f' named {args.system}' if args.system else ''} has `datasets:`; nothing was checked"
        )
    return 1 if bad else 0


def _one(system: str, dataset: Dataset) -> bool:
    """Check one entry, tell about it, and say whether all is well."""
    from pytest_mlhpc.worker.data.check import check_set

    where = f"{system}: {dataset.name}: {dataset.path}"
    try:
        found = check_set(
            dataset.path, dataset.kind, files=dataset.files, size=dataset.bytes, sha256=dataset.digest
        )
    except DataError as error:
        _say(f"{where}: {error.message}")
        return False
    for problem in found.problems:
        _say(f"{where}: {problem}")
    if not found.problems:
        unclaimed = "" if dataset.digest else f"; for systems.yaml: digest: sha256:{found.digest}"
        _say(f"{where}: ok, {found.files} files, {found.bytes} bytes{unclaimed}")
    return not found.problems


def _datasets(args: argparse.Namespace) -> list[tuple[str, Dataset]]:
    """Return (system, data set) of the chosen systems."""
    import os

    from pytest_mlhpc.plugins import make_manager
    from pytest_mlhpc.system.loading import find_systems_file, load_systems

    hook = make_manager().hook
    systems = load_systems(
        find_systems_file(Path.cwd(), args.systems_file),
        schedulers={name: value for answer in hook.mlhpc_schedulers() for name, value in answer.items()},
        launchers={name: value for answer in hook.mlhpc_launchers() for name, value in answer.items()},
        environ=os.environ,
    )
    names = [args.system] if args.system else list(systems.entries)
    return [
        (name, dataset)
        for name in names
        for dataset in systems.system(name, display=True)[0].datasets.values()
    ]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
