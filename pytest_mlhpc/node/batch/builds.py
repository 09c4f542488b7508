"""What a program needs to be built is built before its first run, on the node of the batch, and found ready by all later ones."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Tuple

from pytest_mlhpc.node.batch.ranks import RankBook
from pytest_mlhpc.node.batch.supervise import Supervisor
from pytest_mlhpc.node.files import make_private, own_folder, unwritten
from pytest_mlhpc.node.processes import CappedLog, describe_exit
from pytest_mlhpc.node.protocol.plan import BuildPlan, Plan, RunPlan
from pytest_mlhpc.node.run_files import copy_files, staged_name

#: Lies in the folder of a build that is complete.
COMPLETE = ".complete"

#: Lines of the compiler's output that a failure shows, and most characters of them.
LINES, CHARACTERS = 20, 2000

#: Age of the folder of a build from which on nobody builds in it any more, in seconds: no run takes a week.
OLD_S = 7 * 86400.0

#: Starts the one process of a run and stays until nothing of it is left.
Execute = Callable[[Supervisor, RunPlan], None]
#: Makes the supervisor of a run in a folder.
Supervise = Callable[[RankBook, Path, Any], Supervisor]


class Silent:
    """Takes what a run says of itself: of a build nobody hears but by its failure."""

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send nothing."""

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Show nothing."""


def builds_folder(plan: Plan, *, pod: bool) -> Path:
    """Return the folder of all builds: beside the runs of all sessions, so that later ones find them; in a pod its own."""
    directory = Path(plan.directory)
    return directory / "builds" if pod else own_folder(directory.parents[2], "builds")


def with_builds(run: RunPlan, root: Path) -> RunPlan:
    """Return *run* with the folders of its builds in its arguments, where these name them."""
    argv = run.argv
    for build in run.builds:
        argv = tuple(word.replace(f"{{{build.name}}}", str(root / build.key)) for word in argv)
    return replace(run, argv=argv)


def build_all(
    plan: Plan, run: RunPlan, root: Path, supervise: Supervise, execute: Execute
) -> Optional[Tuple[str, str]]:
    """Build what *run* needs and is not there; return the failure (outcome, text) that the run is, or None.

    Two batches may build the same at once, each in a folder of its own: the first that ends gives its folder the name.

    Raises:
        ControllerGone: the batch has to end; nothing is left of a build that had begun.
    """
    for build in run.builds:
        if (root / build.key / COMPLETE).exists():
            continue
        folder = root / f"{build.key}.{run.nonce}"
        try:
            make_private(root)
            _remove_old(root)
            make_private(folder)
            copy_files(
                {".": str(Path(plan.directory) / staged_name(build.files))} if build.files else {}, folder
            )
        except OSError as error:
            return unwritten(error), f"cannot write {error.filename or folder}: {error.strerror}"
        try:
            failure = _build(run, build, folder, supervise, execute)
            if failure is None:
                (folder / COMPLETE).touch()
                with contextlib.suppress(OSError):  # another batch was first
                    folder.rename(root / build.key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if failure is not None:
            return failure
    return None


def _remove_old(root: Path) -> None:
    """Remove what batches left that were killed while they built: folders of builds without end, whatever they were of."""
    for folder in root.glob("*.*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def _build(
    run: RunPlan, build: BuildPlan, folder: Path, supervise: Supervise, execute: Execute
) -> Optional[Tuple[str, str]]:
    """Run the program that builds, as a run is: within the run's time, and ended with the batch."""
    alone = replace(
        run,
        argv=build.argv,
        launcher="plain",
        processes=1,
        files={},
        artifacts=(),
        cwd=None,
        variables={**run.variables, **build.variables},
    )
    supervisor = supervise(RankBook(alone, ()), folder, Silent())
    execute(supervisor, alone)
    trouble, code = supervisor.book.trouble, supervisor.launcher_exit
    if trouble is None and code == 0:
        return None
    why = describe_exit(code or 0) if code or trouble is None else trouble.text
    lines = supervisor.logs.last_words(0, LINES, CHARACTERS)
    said = f"; its last lines:\n{lines}" if lines and lines not in why else ""
    return "build_failed", f"the build {build.name} ({' '.join(build.argv)[:200]}): {why}{said}"
