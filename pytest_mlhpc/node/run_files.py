"""Files of a program's run: those that it finds in its folder (``files``), and those that its test reads (``artifacts``).

The controller copies ``files`` once for each allocation (:func:`stage`); on the node each run gets a folder of its own with
links to that copy (:func:`link_files`). Artifacts are files of the run's folder; a pod sends them as one archive.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.protocol.plan import Plan, RunPlan

#: Name of the archive in which a pod sends the artifacts of a run, below the run's folder.
ARCHIVE = "artifacts.tar"

#: Most bytes of artifacts that a pod sends: half of what it sends of a program's output (``node/batch/output.py``).
ARCHIVE_BYTES = 8 * 1024 * 1024


#: Logs of a run: of a program, of its first rank, of its launcher, of its container.
LOGS = ("output.log", "rank0.log", "launcher.log", "container.log")


def place_of_run(directory: Path, run_id: str) -> Tuple[Path, Path]:
    """Return the folder and the log of a run, both perhaps not there. *directory* is that of its attempt."""
    inner = directory / run_id
    logs = [place / name for place in (directory, inner) for name in LOGS]
    return (inner if inner.is_dir() else directory), next((one for one in logs if one.is_file()), logs[0])


def start_error(run: RunPlan, error: Exception) -> str:
    """Return why the program of *run* cannot be started, and where it was looked for."""
    why = getattr(error, "strerror", None) or str(error)
    if run.cwd is not None and getattr(error, "filename", None) == run.cwd:
        return f"the folder {run.cwd!r} to start {run.argv[0]!r} in: {why}"
    beside = "among the test's files, and beside the test where the nodes see that folder"
    places = f"relative to {run.cwd!r}" if run.cwd else beside
    where = places if "/" in run.argv[0] else "in the folders of PATH"
    return f"cannot start {run.argv[0]!r}: {why} (looked for {where})"


def staged_name(files: Mapping[str, str]) -> str:
    """Return the folder of the plan's directory in which the copy of *files* lies: equal files share one copy."""
    text = json.dumps(sorted(files.items()))
    return f"files-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"


def staged_sets(plan: Plan) -> Mapping[str, Mapping[str, str]]:
    """Return the different sets of files that runs and builds of *plan* have, by the name of their folder."""
    found = [files for run in plan.runs for files in (run.files, *(build.files for build in run.builds))]
    return {staged_name(files): files for files in found if files}


def packed_sets(plan: Plan) -> Mapping[str, Mapping[str, str]]:
    """Return those sets that a pod gets as archives; the others lie on a volume."""
    return {name: files for name, files in staged_sets(plan).items() if name not in plan.on_volume}


def size_of(files: Mapping[str, str]) -> int:
    """Return how many bytes *files* (path in a run's folder -> source) have together.

    Raises:
        OSError: one cannot be read.
    """
    return sum(path.stat().st_size for source in files.values() for path, _ in regular_files(Path(source)))


def stage(plan: Plan) -> None:
    """Copy the files of all runs into the plan's directory.

    Raises:
        OSError: one cannot be read or written; ``filename`` says which.
    """
    for name, files in staged_sets(plan).items():
        copy_files(files, Path(plan.directory) / name)


def copy_files(files: Mapping[str, str], folder: Path) -> None:
    """Copy *files* (path below *folder* -> source, a file or a whole folder) with their modes, without links.

    Raises:
        OSError: one cannot be read or written.
    """
    for place, source in files.items():
        for path, inside in regular_files(Path(source)):
            target = folder / place / inside if inside else folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(path), str(target))
            target.chmod(path.stat().st_mode & 0o777 | 0o200)


def regular_files(source: Path) -> Iterator[Tuple[Path, str]]:
    """Yield each regular file of *source* with its path inside, empty where *source* is a file itself. Links are followed."""
    if not source.is_dir():
        yield source, ""
        return
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(one for one in folders if one not in ("__pycache__", ".git"))
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file():  # sockets and pipes have nothing to copy
                yield path, path.relative_to(source).as_posix()


def link_files(run: RunPlan, directory: Path, folder: Path) -> None:
    """Fill *folder*, that of the run, with links to the files that were staged below *directory*.

    Folders are made anew, so that a program that writes beside its inputs does not meet another run's files.

    Raises:
        OSError: a link cannot be made.
    """
    if not run.files:
        return
    source = directory / staged_name(run.files)
    for path, inside in regular_files(source):
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():  # the run was started once more
            target.symlink_to(path)


def matching(names: Iterable[str], artifacts: Sequence[str]) -> List[str]:
    """Return those of *names*, paths in the run's folder, that *artifacts* name or match."""
    return [
        name
        for name in names
        if any(name == one or fnmatch.fnmatchcase(name, one) for one in artifacts) and safe(name)
    ]


def safe(name: str) -> bool:
    """Return whether *name* is a path that stays in its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def artifacts_of(folder: Path, artifacts: Sequence[str]) -> List[str]:
    """Return the artifacts that lie in *folder*, as paths in it; links that lead out of it are none."""
    root = folder.resolve()
    found = []
    for path, inside in regular_files(folder):
        if path.resolve().is_relative_to(root):
            found.append(inside)
    return matching(found, artifacts)


def find_artifact(folder: Path, name: str, artifacts: Sequence[str]) -> Optional[Path]:
    """Return where the artifact *name* of a run in *folder* lies, taken out of a pod's archive first; None: nowhere.

    Raises:
        OSError, tarfile.TarError: the archive cannot be read.
    """
    archive = folder / ARCHIVE
    if not (folder / name).is_file() and archive.is_file():
        unpack(archive, folder, artifacts)
    return folder / name if (folder / name).is_file() else None


def archive_of(files: Iterable[Tuple[str, Path]]) -> bytes:
    """Return a compressed tar archive of *files* (name in the archive, path): contents and modes, without owners and times.

    Raises:
        OSError: one cannot be read.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, path in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, path.stat().st_mode & 0o777
            with path.open("rb") as file:
                archive.addfile(member, file)
    return content.getvalue()


def staged_archive(files: Mapping[str, str]) -> bytes:
    """Return the archive of a run's *files* (path in its folder -> source), for nodes that see no folder of ours.

    Raises:
        OSError: one cannot be read.
    """
    return archive_of(
        (os.path.normpath(f"{place}/{inside}" if inside else place), path)
        for place, source in files.items()
        for path, inside in regular_files(Path(source))
    )


def artifact_archive(folder: Path, artifacts: Sequence[str]) -> bytes:
    """Return the archive of the artifacts in *folder*.

    Raises:
        OSError: one cannot be read.
        ValueError: they are larger than what a pod sends.
    """
    names = artifacts_of(folder, artifacts)
    size = sum((folder / name).stat().st_size for name in names)
    if size > ARCHIVE_BYTES:
        raise ValueError(
            f"the artifacts have {size} bytes, a pod sends {ARCHIVE_BYTES}; write large files to a volume"
        )
    return archive_of((name, folder / name) for name in names)


def unpack(archive: Path, folder: Path, only: Sequence[str] = ("*",)) -> None:
    """Put the regular files of *archive* whose names match *only* into *folder*, and nothing else.

    Raises:
        OSError: it cannot be read or written.
        tarfile.TarError: it is damaged.
    """
    with tarfile.open(str(archive), "r:gz") as opened:
        wanted = set(matching([one.name for one in opened.getmembers() if one.isreg()], only))
        for member in opened.getmembers():
            source = opened.extractfile(member) if member.name in wanted and member.isreg() else None
            if source is None:
                continue
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(source, file)
            target.chmod(member.mode & 0o777 | 0o600)
