"""What a test says of its software and its files: variables, environment, modules, image, files. Pure, but for a look at the files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.model import Environment, Partition, Target
from pytest_mlhpc.config.quantities import format_size
from pytest_mlhpc.errors import nearest
from pytest_mlhpc.node.files import may_be_secret
from pytest_mlhpc.node.run_files import safe, size_of

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_MODULE: Final = re.compile(r"[^\s\x00-\x1f\x7f]{1,200}\Z")
#: Most bytes of files that a pod gets: they travel in an object of the API server, which takes 1 MiB
#: (kubernetes.io/docs/concepts/configuration/secret, "Size limit").
POD_FILES_BYTES: Final = 900 * 1024
#: Most bytes of a test's ``files``: they are copied for each run.
MOST_FILES_BYTES: Final = 1 << 30
#: Containers that a test's image can be put into.
_WITHOUT_IMAGE: Final = "has no container whose image could be another; give its environment one (container: {runtime: apptainer, image: ...})"


class SoftwareError(ValueError):
    """A field of a test cannot be what it is; ``key`` names the field."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def variables(given: Mapping[Any, Any] | None) -> dict[str, str]:
    """Return the variables of a test as texts.

    Raises:
        SoftwareError: a name is no name of a variable, or a value neither text nor number.
    """
    found = {}
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not _VARIABLE.match(name):
            raise SoftwareError("env", f"{name!r:.80} is no name of a variable")
        if name.startswith("MLHPC_"):
            raise SoftwareError("env", f"{name} is set for each run; choose another name")
        if (
            isinstance(value, bool)
            or not isinstance(value, (str, int, float, os.PathLike))
            or "\0" in str(value)
        ):
            raise SoftwareError("env", f"{name}: expected text or a number, found {value!r:.80}")
        found[name] = str(value)
    return found


def for_record(env: Mapping[str, str]) -> dict[str, str]:
    """Return *env* as records may show it: of what may be a secret, the name alone."""
    return {name: "***" if may_be_secret(name) else text for name, text in env.items()}


def target_with(target: Target, environment: str, modules: Sequence[str], image: str) -> Target:
    """Return *target* with the environment, modules and image that a test asks for.

    Raises:
        SoftwareError: its partition has no such environment, or cannot load modules or images.
    """
    partition = target.partition
    chosen = _environment(partition, environment) if environment else target.environment
    if modules and partition.scheduler not in {"slurm", "commands"}:
        text = f"are loaded by a job script, and {partition.id} ({partition.scheduler}) has none"
        raise SoftwareError("modules", text)
    if bad := [name for name in modules if not _MODULE.match(name)]:
        raise SoftwareError("modules", f"{bad[0]!r:.80} is no name of a module")
    if image and (" " in image or not image.isprintable()):
        raise SoftwareError("image", f"{image!r:.80} is no name of an image")
    if image and partition.scheduler != "kubernetes" and not chosen.extra.get("container"):
        raise SoftwareError("image", f"{partition.id} {_WITHOUT_IMAGE}")
    return replace(target, environment=chosen.with_software(modules, image))


def _environment(partition: Partition, name: str) -> Environment:
    known = {one.name: one for one in partition.environments}
    if name in known:
        return known[name]
    hint = nearest(name, known)
    text = f"{partition.id} has no environment {name!r}; it has {', '.join(known)}"
    raise SoftwareError("environment", text + (f" (did you mean {hint!r}?)" if hint else ""))


def files_of(
    given: Sequence[str], folder: Path, partition: Partition, most: int = MOST_FILES_BYTES
) -> dict[str, str]:
    """Return path in the run's folder -> source of the *given* files, folders and globs, relative to *folder*.

    What lies outside of *folder* is put beside the others by its own name.

    Raises:
        SoftwareError: one is missing or cannot be read, two have one place, or they have more than *most* bytes.
    """
    found: dict[str, str] = {}
    for pattern in given:
        for source in _sources(pattern, folder):
            place = _place(source, folder)
            if found.setdefault(place, str(source)) != str(source):
                raise SoftwareError("files", f"{found[place]} and {source} would both be {place}")
    size = _size(found.values())
    if size > most:
        raise SoftwareError(
            "files",
            f"have {format_size(size)}, more than {format_size(most)}; name a folder that the nodes see, by cwd or in the command",
        )
    check_size(found, partition)
    return found


def check_size(files: Mapping[str, str], partition: Partition) -> None:
    """Check that *partition* can give a run so many bytes of *files* (path in its folder -> source).

    Raises:
        SoftwareError: it cannot, or one of them cannot be read.
    """
    if partition.scheduler != "kubernetes" or (size := _size(files.values())) <= POD_FILES_BYTES:
        return
    text = f"have {format_size(size)}, a pod gets {POD_FILES_BYTES >> 10}KiB at most without a volume"
    volumes = [one for one in partition.scheduler_options.get("volumes") or () if one.get("here")]
    if not volumes:
        example = "{name: scratch, claim: scratch, mount: /scratch, here: /mnt/scratch}"
        raise SoftwareError(
            "files", f"{text}; say where this machine sees a volume of {partition.id}: {example}"
        )
    if not os.path.isdir(volumes[0]["here"]):  # noqa: PTH112 - Path's raises for a closed folder
        problem = f"the volume {volumes[0]['name']} of {partition.id} is not seen in {volumes[0]['here']}"
        raise SoftwareError("files", f"{text}, and {problem}, which is no folder here")


def _sources(pattern: str, folder: Path) -> Iterator[Path]:
    path, why = Path(os.path.normpath(folder / pattern)), ""
    try:
        path.stat()
        names = [path]
    except OSError as error:  # a name too long, a closed folder, a circle of links; a glob is mostly no file
        names = []
        why = "" if error.errno in {errno.ENOENT, errno.ENOTDIR} else f": {error.strerror}"
    try:
        found = folder.glob(pattern) if _is_glob(pattern) and not names else ()
        # `../src/*` is not below folder
        names = names or sorted(Path(os.path.normpath(one)) for one in found)
    except (OSError, ValueError) as error:  # ValueError: `**` beside other letters
        why = f": {getattr(error, 'strerror', None) or error}"
    if not names:
        beside = path.parent.glob("*") if os.path.isdir(path.parent) else ()  # noqa: PTH112 - Path's raises for a closed folder
        hint = nearest(Path(pattern).name, [one.name for one in beside if one != path])
        meant = f" (did you mean {hint!r}?)" if hint else ""
        raise SoftwareError("files", f"there is no {_short(pattern)} in {folder}{meant}{why}")
    yield from names


def _short(pattern: str) -> str:
    text = repr(pattern)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _is_glob(pattern: str) -> bool:
    return not pattern.startswith("/") and any(sign in pattern for sign in "*?[")


def _place(source: Path, folder: Path) -> str:
    """Return where *source* is put in the run's folder; a glob or name of the whole folder is put there as it is."""
    if source == folder:
        return "."
    return source.relative_to(folder).as_posix() if source.is_relative_to(folder) else source.name


def _size(sources: Iterable[str]) -> int:
    try:
        return size_of({source: source for source in sources})
    except OSError as error:
        raise SoftwareError("files", f"cannot read {error.filename}: {error.strerror}") from error


def check_artifacts(names: Sequence[str]) -> None:
    """Check that *names* can be artifacts.

    Raises:
        SoftwareError: one leads out of the run's folder.
    """
    bad = next((name for name in names if not safe(name)), "")
    if bad:
        raise SoftwareError("artifacts", f"{bad!r} is no path in the run's folder")


def is_staged(name: str, files: Mapping[str, str]) -> bool:
    """Return whether *name*, a relative path, is among *files*."""
    wanted = os.path.normpath(name)
    for place, source in files.items():
        if place == wanted and Path(source).is_file():
            return True
        if place == "." or wanted.startswith(f"{place}/"):
            inside = wanted if place == "." else wanted[len(place) + 1 :]
            if Path(source, inside).is_file():
                return True
    return False
