"""PAYLOAD, standard library only. Is a data set what its entry says? Files, bytes, and the digest of one of them.

``files`` counts the regular files below the path, but hidden ones and our manifest; ``bytes`` is their sum; ``digest`` is
the SHA-256 of the first of them by path, in hexadecimal, with or without ``sha256:`` before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Tuple

from pytest_mlhpc.node.worker.data.errors import DataError
from pytest_mlhpc.node.worker.data.files import check_manifest, digest, list_files, read_manifest, total_bytes

_PREFIX = "sha256:"


@dataclass(frozen=True)
class Found:
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
) -> Found:
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
    return Found(len(there), total, there[0].relative_to(root).as_posix(), found, tuple(problems))
