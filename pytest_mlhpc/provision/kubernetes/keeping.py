"""What is kept for a look after its end: noted beside the records, deleted by a later session once its time is over.

Each note is ``<state>/kept/<allocation>.json``; that the cluster's objects carry the same time as an annotation is for people.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.where import Where, read
from pytest_mlhpc.results.foreign import read_json

FOLDER: Final = "kept"


@dataclass(frozen=True)
class Cleared:
    """One allocation whose time is over: what was done; where that did not work, it is tried again another time."""

    allocation_id: str
    text: str
    done: bool

    def __str__(self) -> str:
        """Return one line."""
        return f"kept allocation {self.allocation_id}: {self.text}"


def note(directory: Path, until_s: int) -> None:
    """Note that the allocation of this *directory* (``<state>/runs/<session>/<id>``) is kept until then (seconds since 1970).

    Raises:
        OSError: it cannot be written; what is kept without a note is found by nobody.
    """
    folder = directory.parents[2] / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{directory.name}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"until": until_s, "directory": str(directory)}) + "\n", encoding="utf-8")
    temporary.replace(path)


def kept_too_long(state_dir: Path, now_s: float) -> list[str]:
    """Return one line for each allocation whose time is over at *now_s*; notes that cannot be read are left out."""
    found = []
    for path in sorted((state_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            until, _ = _read(path)
            if now_s >= until:
                found.append(
                    f"kept allocation {path.stem}: it was kept until {_date(until)}: would be deleted"
                )
    return found


def clear_kept(
    state_dir: Path,
    end: Callable[[KubernetesApi, Where, str], str],
    connect: Callable[[Where], KubernetesApi],
    now_s: float,
) -> Iterator[Cleared]:
    """Let *end* delete everything of allocations whose time is over at *now_s*, one after the other.

    Two sessions may do so at once: what is gone already is no error.
    """
    apis: dict[tuple[str, str, str], KubernetesApi] = {}
    try:
        for path in sorted((state_dir / FOLDER).glob("*.json")):
            try:
                until, directory = _read(path)
                if now_s >= until:
                    text = _end(directory, apis, end, connect)
                    path.unlink(missing_ok=True)
                    yield Cleared(path.stem, f"{text}; it was kept until {_date(until)}", done=True)
            except FileNotFoundError:
                continue  # another session was faster
            except (MlhpcError, OSError, ValueError) as error:
                yield Cleared(path.stem, f"not deleted, stays noted in {path}: {error}", done=False)
    finally:
        for api in apis.values():
            api.close()


def _end(
    directory: Path,
    apis: dict[tuple[str, str, str], KubernetesApi],
    end: Callable[[KubernetesApi, Where, str], str],
    connect: Callable[[Where], KubernetesApi],
) -> str:
    where = read(directory)
    if where is None:
        raise MlhpcError(f"{directory} does not say in which cluster it is")
    key = (where.kubeconfig, where.context, where.namespace)
    if key not in apis:
        apis[key] = connect(where)
    if not where.is_at(apis[key]):
        raise MlhpcError(where.elsewhere(apis[key]))
    return end(apis[key], where, directory.name)


def _read(path: Path) -> tuple[int, Path]:
    found = read_json(path.read_text(encoding="utf-8"))
    try:
        return int(found["until"]), Path(found["directory"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no note of ours ({error!r})") from error


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
