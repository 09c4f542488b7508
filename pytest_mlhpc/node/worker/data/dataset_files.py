"""Files of a data set: atomic writing, listing, digest, manifest, check against a claim, and residency in the page cache.

Also what a synthetic set consists of. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import glob
import hashlib
import json
import mmap
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from pytest_mlhpc.node.files import NO_ROOM, read_json, replace_file
from pytest_mlhpc.node.worker.environment import WorkerFailure


class DataError(WorkerFailure):
    """A data set is damaged, missing, of another shape than asked, or cannot be written. Names the file.

    ``outcome`` is ``data_unusable``, ``disk_full`` or ``import_failed`` (a library for the format is missing).
    torch raises an error of a loader process again as ``type(text)``, with the traceback in the text: hence the default.
    """

    def __init__(
        self, path: Union[str, os.PathLike[str]], message: str = "", outcome: str = "data_unusable"
    ) -> None:
        self.path = os.fspath(path)
        self.message = message
        super().__init__(outcome, f"{self.path}: {message}" if message else self.path)
        self.args = (path, message, outcome)  # what pickling calls the class with

    def __str__(self) -> str:
        return self.text


def write_error(path: Union[str, os.PathLike[str]], error: OSError) -> DataError:
    """Return what to raise when writing *path* failed with *error*."""
    if error.errno in NO_ROOM:
        text = f"no room to write it ({error.strerror}): free space, raise the quota, or use fewer samples"
        return DataError(path, text, "disk_full")
    return DataError(path, f"cannot be written ({error.strerror or error})")


def read_error(path: Union[str, os.PathLike[str]], error: OSError, expected: str) -> DataError:
    """Return what to raise when reading *path* failed with *error*; *expected* says what should have been there."""
    return DataError(path, f"cannot be read ({error.strerror or error}), expected {expected}")


MANIFEST = "manifest.json"
#: Version of the manifest. Readers take older ones and refuse newer ones.
MANIFEST_SCHEMA = 1
_MANIFEST_LIMIT = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """What a set of ours holds. ``sha256`` is that of ``sample``, the first file by name (relative path).

    ``layout`` is what it was made from (workload, format, sizes, seed, samples): equal layouts are equal sets.
    """

    layout: Mapping[str, Any]
    files: int
    bytes: int
    sample: str
    sha256: str
    kind: str = "synthetic"
    schema: int = MANIFEST_SCHEMA


def write_file(path: Path, content: Union[bytes, memoryview]) -> None:
    """Write *content* to *path* whole or not at all.

    Raises:
        DataError: no room, no permission; nothing is left behind.
    """
    try:
        replace_file(
            path, content, durable=False
        )  # a set of half a million samples is made again sooner than synced
    except OSError as error:
        raise write_error(path, error) from None


def list_files(root: Path, omit: Container[str] = ()) -> List[Path]:
    """Return the regular files below *root* but hidden ones and the manifest, sorted by path.

    Links are followed, each folder is entered once. Folders named in *omit* are not entered; links to nothing, pipes
    and devices are left out.

    Raises:
        DataError: *root* is missing, no folder, or cannot be read.
    """
    if not root.is_dir():
        raise DataError(
            root, "is not there" if not root.exists() else "is no folder, expected one of samples"
        )
    found: List[Path] = []
    entered: Set[Tuple[int, int]] = set()
    waiting = [os.fspath(root)]
    try:
        while waiting:
            folder = waiting.pop()
            status = os.stat(folder)  # noqa: PTH116 - half a million times, and a path object is not needed
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in omit:
                        continue
                    if entry.is_dir():
                        waiting.append(entry.path)
                    elif entry.is_file() and entry.name != MANIFEST:
                        found.append(Path(entry.path))
            waiting.sort(
                reverse=True
            )  # which of two names of one folder counts must not depend on the file system
    except OSError as error:
        raise read_error(error.filename or root, error, "a folder of samples") from None
    return sorted(found)


def total_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of all *files*.

    Raises:
        DataError: one of them is gone.
    """
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise read_error(error.filename or "?", error, "a sample") from None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                total.update(block)
    except OSError as error:
        raise read_error(path, error, "a sample") from None
    return total.hexdigest()


def describe(root: Path, layout: Mapping[str, Any]) -> Manifest:
    """Return the manifest of the files that lie below *root* now."""
    files = list_files(root)
    if not files:
        raise DataError(root, "holds no files")
    return Manifest(
        layout=dict(layout),
        files=len(files),
        bytes=total_bytes(files),
        sample=files[0].relative_to(root).as_posix(),
        sha256=digest(files[0]),
    )


def read_manifest(root: Path) -> Optional[Manifest]:
    """Return the manifest of *root*, or None where there is none.

    Raises:
        DataError: there is one, and it is damaged or of a newer release.
    """
    path = root / MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise DataError(path, f"is larger than {_MANIFEST_LIMIT} bytes, it is not our manifest")
        values: Dict[str, Any] = read_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(path, error, "a manifest") from None
    except (ValueError, RecursionError):
        raise DataError(path, "is damaged (no JSON), remove the folder and make the set again") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if not isinstance(schema, int):
        raise DataError(path, "is not our manifest (it has no integer `schema`)")
    if schema > MANIFEST_SCHEMA:
        raise DataError(
            path, f"has schema {schema}, this release reads up to {MANIFEST_SCHEMA}: upgrade pytest-mlhpc"
        )
    names = {field.name: field.type for field in dataclasses.fields(Manifest)}
    wanted = {"layout": dict, "files": int, "bytes": int, "sample": str, "sha256": str, "kind": str}
    wrong = sorted(name for name, kind in wanted.items() if not isinstance(values.get(name), kind))
    if wrong:
        raise DataError(path, f"is damaged: {', '.join(wrong)} missing or of a wrong type")
    return Manifest(**{name: values[name] for name in names})


def check_manifest(root: Path, manifest: Manifest) -> List[str]:
    """Return what differs between *manifest* and the files that are there; empty when all agree."""
    files = list_files(root)
    size = total_bytes(files)
    problems = []
    if len(files) != manifest.files:
        problems.append(f"{len(files)} files, its manifest says {manifest.files}")
    if size != manifest.bytes:
        problems.append(f"{size} bytes, its manifest says {manifest.bytes}")
    sample = root / manifest.sample
    if sample not in files:
        problems.append(f"the sample {manifest.sample} is missing")
    elif digest(sample) != manifest.sha256:
        problems.append(f"the sample {manifest.sample} has another SHA-256 than its manifest says")
    return problems


@contextlib.contextmanager
def building(root: Path) -> Iterator[Optional[Path]]:
    """Hold the lock of *root*, and yield the folder to build it in, or None when a complete set is there already.

    Leaving the block without an error renames the folder to *root*; with one, nothing is left. Of several processes one
    builds and the others wait. Where the file system has no locks, they all build, and the first to end wins.

    Raises:
        DataError: *root* holds something that is not ours, or cannot be written.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with _locked(root.parent) as locked:
            if occupied(root):
                yield None
                return
            if locked:  # whoever left these behind was killed, for nobody else can be building now
                for stale in root.parent.glob(f"{glob.escape(_hidden(root, ''))}*"):
                    shutil.rmtree(stale, ignore_errors=True)
            folder = root.parent / _hidden(root, uuid.uuid4().hex[:8])
            folder.mkdir()
            try:
                yield folder
                _settle(folder, root)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise write_error(error.filename or root, error) from None


def _hidden(root: Path, token: str) -> str:
    """Return the name of the folder that *root* is built in."""
    return f".{root.name}.making-{token}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of *folder* (of the folder itself: no lock file is left), and say whether there are locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks on this file system
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _settle(folder: Path, root: Path) -> None:
    """Rename *folder* to *root*, unless somebody else's equal set got there first."""
    try:
        folder.rename(root)
    except OSError:
        if not occupied(root):
            raise


def occupied(root: Path) -> bool:
    """Say whether *root* holds a set of ours; False when it is missing or empty.

    Raises:
        DataError: it holds anything else.
    """
    try:
        if not any(root.iterdir()):
            return False
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise DataError(root, "is a file, expected a folder to make the set in") from None
    except OSError as error:
        raise read_error(root, error, "an empty folder") from None
    if read_manifest(root) is None:
        raise DataError(root, f"is not empty and holds no {MANIFEST}: name a new or an empty folder")
    return True


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest: the last file of a set."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2, sort_keys=True)
    write_file(root / MANIFEST, f"{text}\n".encode())


#: workload -> its formats, the default first.
FORMATS: Mapping[str, Tuple[str, ...]] = {
    "cosmoflow": ("tfrecord-gzip", "tfrecord", "hdf5"),
    "deepcam": ("hdf5",),
    "resnet50": ("images",),
}
#: Most frequent picture of ImageNet, for crops of 224 pixels; smaller crops get smaller pictures.
PICTURE = (375, 500)
CROP = 224
#: Raised when equal layouts would give other bytes than before, so that old sets are not taken for new ones.
REVISION = 1


@dataclass(frozen=True)
class SetLayout:
    """One synthetic set. ``sizes``: edge (cosmoflow), height and width (deepcam, resnet50), classes (resnet50).

    ``sizes`` also has ``learnable`` (1) where a small model is to learn its task quickly (``make.py``).
    """

    workload: str
    format: str
    sizes: Mapping[str, int]
    samples: int
    validation: int
    seed: int
    revision: int = REVISION

    def as_json(self) -> Dict[str, Any]:
        """Return plain JSON values, as they stand in the manifest."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """A folder name that differs for sets that differ."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return f"{self.workload}-{self.format}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def learnable(self) -> bool:
        """Whether targets are shown plainly, instead of samples that pack like real ones."""
        return bool(self.sizes.get("learnable"))

    @property
    def raw_bytes(self) -> int:
        """Bytes of one sample, unpacked: what has to be made."""
        if self.workload == "cosmoflow":
            return self.sizes["edge"] ** 3 * 4 * 2
        pixels = self.sizes["height"] * self.sizes["width"]
        return pixels * (16 * 4 + 8) if self.workload == "deepcam" else pixels * 3

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample on disk, about (for the question whether there is room)."""
        packed = {"tfrecord-gzip": 0.16, "images": 0.22}.get(self.format, 1.0)
        return int(
            self.raw_bytes * (0.16 if self.workload == "cosmoflow" and self.format == "hdf5" else packed)
        )


def layout_of(
    workload: str,
    parameters: Mapping[str, Any],
    *,
    samples: int,
    validation: int,
    seed: int,
    form: str = "",
    learnable: bool = False,
) -> SetLayout:
    """Return the layout of a set for *workload* with these fields; *form* is one of its formats, empty: the default.

    Raises:
        DataError: the workload has no format, or not this one.
    """
    if workload not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise DataError(workload, f"has no file format to make a synthetic set in, these have: {known}")
    form = form or FORMATS[workload][0]
    if form not in FORMATS[workload]:
        raise DataError(workload, f"has no format {form!r}, choose one of {', '.join(FORMATS[workload])}")
    more = {"learnable": 1} if learnable else {}
    return SetLayout(workload, form, {**_sizes(workload, parameters), **more}, samples, validation, seed)


def _sizes(workload: str, parameters: Mapping[str, Any]) -> Dict[str, int]:
    """Return what of the workload's fields decides the size of a sample."""
    if workload == "cosmoflow":
        return {"edge": int(parameters["input_size"])}
    if workload == "deepcam":
        return {"height": int(parameters["height"]), "width": int(parameters["width"])}
    crop = int(parameters["image_size"])
    height, width = (max(1, extent * crop // CROP) for extent in PICTURE)
    return {"height": height, "width": width, "classes": int(parameters["classes"])}


_PREFIX = "sha256:"


@dataclass(frozen=True)
class FoundFiles:
    """What lies there, and what is wrong with it."""

    files: int
    bytes: int
    sample: str
    digest: str
    problems: Tuple[str, ...]


def check_set(
    path: str,
    kind: str,
    *,
    files: Optional[int] = None,
    size: Optional[int] = None,
    sha256: Optional[str] = None,
) -> FoundFiles:
    """Compare the set at *path* with what is claimed of it; None: no claim.

    Raises:
        DataError: there is no set, or it cannot be read.
    """
    root = Path(path)
    there = list_files(root)
    if not there:
        raise DataError(root, "holds no files")
    found = digest(there[0])
    total = total_bytes(there)
    problems = []
    if files is not None and len(there) != files:
        problems.append(f"{len(there)} files, systems.yaml says {files}")
    if size is not None and total != size:
        problems.append(f"{total} bytes, systems.yaml says {size}")
    if sha256 is not None and found != sha256.lower().removeprefix(_PREFIX):
        problems.append(f"{there[0]} has SHA-256 {found}, systems.yaml says {sha256}")
    empty = next((file for file in there if file.stat().st_size == 0), None)
    if empty is not None:
        problems.append(f"{empty} is empty")
    manifest = read_manifest(root)
    if manifest is not None:
        problems += check_manifest(root, manifest)
        if manifest.kind != kind:
            problems.append(f"it is {manifest.kind} (its manifest says), systems.yaml says {kind}")
    return FoundFiles(len(there), total, there[0].relative_to(root).as_posix(), found, tuple(problems))


#: At most this share of pages may be resident for a set to be called cold; at least 1 - this for warm.
TOLERANCE = 0.01
_PROT_READ = 1
_MAP_SHARED = 1
_BLOCK = 1 << 22


def _libc() -> ctypes.CDLL:
    """Return the C library with the prototypes that keep 64-bit addresses whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc


def resident_pages(path: Path) -> Tuple[int, int]:
    """Return (resident pages, all pages) of a file. The mapping itself touches no page.

    Raises:
        DataError: the file cannot be opened.
        OSError: the kernel refuses to tell.
    """
    libc = _libc()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise read_error(path, error, "a sample") from None
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return 0, 0
        pages = -(-size // mmap.PAGESIZE)
        address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap failed", str(path))
        try:
            flags = (ctypes.c_ubyte * pages)()
            if libc.mincore(address, size, flags):
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
            return sum(flag & 1 for flag in flags), pages
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)


def residency(paths: Iterable[Path]) -> float:
    """Return the resident share of all pages of *paths*, 0 to 1 (0 when there are none)."""
    counts: List[Tuple[int, int]] = [resident_pages(path) for path in paths]
    total = sum(pages for _, pages in counts)
    return sum(resident for resident, _ in counts) / total if total else 0.0


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop the pages of *paths*; dirty pages cannot be dropped, so they are written out first.

    Raises:
        DataError: a file cannot be opened.
        OSError: the file system cannot do it.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise read_error(path, error, "a sample") from None
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(paths: Iterable[Path]) -> None:
    """Read all of *paths* once."""
    block = bytearray(_BLOCK)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    continue
        except OSError as error:
            raise read_error(path, error, "a sample") from None


def prepare(paths: Sequence[Path], wanted: str) -> str:
    """Bring *paths* into the state *wanted* ("cold", "warm", "unknown"), and return the state that was verified.

    All ranks of a node call this for the same set at about the same time, each right after it read the first file to see
    that it fits. So that file does not count: another rank may be reading it now, and will evict it a moment later.
    """
    if wanted not in ("cold", "warm") or not paths:
        return "unknown"
    judged = paths[1:] or paths
    try:
        if wanted == "cold":
            evict(paths)
            return "cold" if residency(judged) <= TOLERANCE else "unknown"
        read_through(paths)
        return "warm" if residency(judged) >= 1 - TOLERANCE else "unknown"
    except OSError:  # a kernel or a file system that does not tell: then nobody knows
        return "unknown"
