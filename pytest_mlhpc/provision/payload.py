"""The files that every provisioner writes: the payload, one zip named by the hash of its content, and a plan's folder."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.spec import FROM_SOURCE
from pytest_mlhpc.node.files import (
    NO_ROOM,
    PRIVATE_FILE,
    UnsafeDirectoryError,
    make_private,
    open_private,
    own_folder,
    read_private,
    replace_file,
    unwritten,
)
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.store.locations import make_directories

#: What travels of this package.
FOLDER = "node"

#: Largest zip: a Kubernetes Secret holds 1 MiB (kubernetes.io, Secrets).
MAX_BYTES = 1024 * 1024

#: Timestamp of every member, the earliest that the zip format knows: the same sources give the same bytes.
EPOCH = (1980, 1, 1, 0, 0, 0)


class Payload(NamedTuple):
    """A zip that lies in the state directory. ``sha256`` is also its name."""

    path: Path
    sha256: str


def build(state_dir: Path, extra_modules: Sequence[str] = ()) -> Payload:
    """Return the payload of the sources as they are now, written to this user's folder of payloads below *state_dir*.

    *extra_modules* are import names of third parties' modules and packages that their workloads need on the nodes.
    Takes about 10 ms; a session keeps the answer.

    Raises:
        UsageError: an extra module cannot be found, or the zip would be too large.
        ProvisionError: ``disk_full``, the zip cannot be written; ``unsafe_directory``, its folder is no folder of ours.
    """
    content = pack(dict(sorted([*own_files(), *nvml(), *extra_files(sorted(set(extra_modules)))])))
    if len(content) > MAX_BYTES:
        raise UsageError(
            f"the payload has {len(content)} bytes, more than {MAX_BYTES}: ship fewer extra_modules"
        )
    sha256 = hashlib.sha256(content).hexdigest()
    path = payload_path(state_dir, sha256)
    try:
        if not _holds(path, content):
            state_dir.mkdir(parents=True, exist_ok=True)
            make_private(path.parent)
            replace_file(path, content, mode=PRIVATE_FILE)
    except OSError as error:
        text = f"cannot write the payload {path}: {error.strerror}"
        raise ProvisionError(unwritten(error), text) from error
    return Payload(path, sha256)


def payload_path(state_dir: Path, sha256: str) -> Path:
    """Return where this user's payload with this hash lies; what is in it is run, so none is shared."""
    return own_folder(state_dir, "payload") / f"{sha256}.zip"


def pack(files: dict[str, Path]) -> bytes:
    """Return a zip of *files* (member name -> source), the same bytes for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in files.items():
            member = zipfile.ZipInfo(name, EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            archive.writestr(member, path.read_bytes())
    return buffer.getvalue()


def own_files() -> Iterator[tuple[str, Path]]:
    """Yield member name and source of our own modules that nodes run."""
    package = Path(__file__).parents[1]
    yield (
        f"{package.name}/__init__.py",
        Path(os.devnull),
    )  # empty: the public names are for tests, which no node runs
    yield from _files(package / FOLDER, package.parent, (".py", ".json"))


def nvml() -> Iterator[tuple[str, Path]]:
    """Yield nvidia-ml-py's one module if the controller has it: pure Python, and few sites' environments hold it."""
    spec = importlib.util.find_spec("pynvml")
    if spec is not None and spec.origin is not None and spec.origin.endswith("/pynvml.py"):
        yield "pynvml.py", Path(spec.origin)


def extra_files(modules: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield member name and source of third parties' modules, with the packages that they lie in.

    Raises:
        UsageError: a module cannot be found, or has no source file.
    """
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise UsageError(f"cannot find {name!r}, which a workload wants on the nodes: {error}") from error
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise UsageError(f"cannot find the source of {name!r}, which a workload wants on the nodes")
        origin = Path(spec.origin)
        root = origin.parents[len(name.split(".")) - (0 if origin.name == "__init__.py" else 1)]
        for parent in list(origin.relative_to(root).parents)[:-1]:
            if (root / parent / "__init__.py").exists():
                yield str(parent / "__init__.py"), root / parent / "__init__.py"
        if origin.name == "__init__.py":
            yield from _files(origin.parent, root, (".py",))
        else:
            yield str(origin.relative_to(root)), origin


def _files(folder: Path, root: Path, endings: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith(endings):
                path = Path(where) / name
                yield str(path.relative_to(root)), path


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_private(path) == content  # a zip cut short by a crash or a full disk is written again
    except (FileNotFoundError, UnsafeDirectoryError):  # as is one that an older version left open to others
        return False


def environment_of(plan: Plan, partition: Partition, run: RunPlan | None = None) -> Environment:
    """Return the environment that *plan* names, or *run* for itself, with the software that its tests ask for.

    Raises:
        ProvisionError: ``rejected``, the partition has none of this name (an adopted plan after an edit).
    """
    name = (run.environment if run is not None else "") or plan.environment
    for environment in partition.environments:
        if environment.name == name:
            return environment.with_software(
                plan.modules, (run.image if run is not None else "") or plan.image
            )
    raise ProvisionError("rejected", f"{partition.id} has no environment {name!r} any more")


def make_session_directory(directory: Path) -> None:
    """Make a session's folder below ``runs``, for this user alone. ``runs`` may be a group's, like the state directory.

    Raises:
        OSError: it cannot be made, or is another user's (UnsafeDirectoryError).
    """
    runs, root = directory.parent, directory.parent.parent
    make_directories(runs, root)
    found, sticky = runs.stat(), stat.S_ISVTX & root.stat().st_mode
    if sticky and not found.st_mode & sticky and found.st_uid == os.geteuid():
        # No user may rename another's folder here, as in the state directory.
        runs.chmod(stat.S_IMODE(found.st_mode) | sticky)
    make_private(directory)


def make_directory(directory: Path, *inside: str) -> None:
    """Make an allocation's folder below its session's, and those *inside*, all for this user alone.

    Raises:
        OSError: one cannot be made, or is another user's (UnsafeDirectoryError).
    """
    make_session_directory(directory.parent)
    for folder in (directory, *(directory / name for name in inside)):
        make_private(folder)


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file that only this user may read and change: nodes execute it, and variables may hold secrets.

    Raises:
        OSError: it cannot be written, is another user's (UnsafeDirectoryError), or exists although *new* is set.
    """
    flags = os.O_EXCL if new else os.O_TRUNC
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | flags), "w", encoding="utf-8") as file:
        file.write(text)


def cannot_write(error: OSError, path: Path) -> ProvisionError:
    """Return the error of an allocation whose files below *path* cannot be written, or are not this user's alone."""
    return ProvisionError(unwritten(error), no_room(error, path))


def no_room(error: OSError, path: Path) -> str:
    """Return which file could not be written, why, and what to do about it."""
    if isinstance(error, UnsafeDirectoryError):
        return f"{error.filename}: {error.strerror}"
    hint = "; free space, or choose another state directory" if error.errno in NO_ROOM else ""
    return f"cannot write {error.filename or path}: {error.strerror}{hint}"


def payload_of(root: Path) -> Callable[[str], Path | None]:
    """Return what finds the zip of a hash below *root*; it finds None where a plan needs none."""
    return lambda sha: None if sha == FROM_SOURCE else payload_path(root, sha)
