"""The search for metrics in a program's output and files, a process of its own that can be ended.

It runs as ``python -I -S output_search.py``.

A regular expression may run for ever, and Python's cannot be interrupted: hence a file of its own, without imports of this
package. Standard input is one JSON object ``{"path": ..., "patterns": {name: pattern}}``. Standard output is
``{name: [[text, after]]}`` with the first group of every match, and what stands behind it. A request with ``functions`` calls those of a test instead; then the
package is imported, and the answer is ``{"samples": {name: [value]}, "errors": {name: text}, "unsound": text}``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: How long after its time limit this process ends itself, in seconds: the session that asked may have been killed.
GRACE_S = 5

#: Characters behind a group that are returned: a unit is shorter.
AFTER = 32


def search(patterns: Mapping[str, str], text: str) -> dict[str, list[list[str]]]:
    """Return the matches of each pattern's first group, in order, with what follows. ``^`` and ``$`` match at every line."""
    found: dict[str, list[list[str]]] = {}
    for name, pattern in patterns.items():
        matches = re.finditer(pattern, text, re.MULTILINE)
        found[name] = [
            [match[1], text[match.end(1) : match.end(1) + AFTER].partition("\n")[0]]
            for match in matches
            if match[1] is not None
        ]
    return found


def values_of(name: str, text: str, key: str) -> list[object]:
    """Return the values of *key* in a file of this *name* and content: a path in JSON, a column of CSV.

    Raises:
        KeyError: there is no such key; the argument says which there are.
        ValueError: it is no such file.
    """
    if name.endswith((".csv", ".tsv")):
        return _column(text, key)
    lines = [text]
    if name.endswith((".jsonl", ".ndjson")):
        lines = [line for line in text.splitlines() if line.strip()]
    path = key.split(".")
    try:
        return [one for line in lines for one in _at(json.loads(line), path, path)]
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _at(data: Any, left: Sequence[str], path: Sequence[str]) -> Iterator[object]:
    """Yield what lies at the path *left* in *data*; a list at its end is a list of samples."""
    if not left:
        yield from data if isinstance(data, list) else [data]
        return
    head, *rest = left
    inner = dict(enumerate(data)) if isinstance(data, list) else data
    if not isinstance(inner, dict):
        before = ".".join(path[: len(path) - len(left)])
        raise KeyError(f"{before!r} is {str(data)[:40]!r}, which has no {head!r}")
    if head == "*":
        for one in inner.values():
            yield from _at(one, rest, path)
        return
    at: Any = int(head) if isinstance(data, list) and head.isdecimal() else head
    if at not in inner:
        known = ", ".join(map(str, list(inner)[:20])) or "nothing"
        raise KeyError(f"there is no {'.'.join(path[: len(path) - len(rest)])!r}; there are {known}")
    yield from _at(inner[at], rest, path)


def _column(text: str, key: str) -> list[object]:
    """Return the cells of a column that are not empty; the first line names the columns."""
    head = text.partition("\n")[0]
    delimiter = max(",\t;", key=head.count)
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    names = [name.strip() for name in rows[0]] if rows else []
    if names and names[0].startswith("#"):
        names[0] = names[0][1:].strip()
    if key not in names:
        raise KeyError(f"there is no column {key!r}; there are {', '.join(names[:20]) or 'none'}")
    at = names.index(key)
    return [row[at].strip() for row in rows[1:] if len(row) > at and row[at].strip()]


@dataclass(frozen=True)
class RankFiles:
    """What one rank printed, standard output and error line by line, and standard error alone; as far as the logs have it."""

    output: str
    errors: str


def _index(path: Path) -> list[tuple[int, int]] | None:
    """Return (rank, bytes) of each part of a log, as the batch noted them (``RankIndex`` in node/batch/output.py); None: there is none."""
    if not path.is_file():
        return None
    found = re.findall(r"^(-?\d{1,7}) (\d{1,10})$", path.read_text("ascii", "replace"), re.MULTILINE)
    return [(int(rank), int(size)) for rank, size in found]


def _texts_of_ranks(log: Path, index: Sequence[tuple[int, int]], count: int) -> list[str]:
    """Return what *log* has of each of *count* ranks."""
    data, at = log.read_bytes() if log.is_file() else b"", 0
    texts = [bytearray() for _ in range(count)]
    for rank, size in index:
        if rank >= 0:
            texts[rank] += data[at : at + size]
        at += size
    return [bytes(text).decode("utf-8", "replace") for text in texts]


@dataclass(frozen=True)
class RunFiles:
    """What a run left: ``output``, ``errors``, and its *artifacts* in *folder*. *log* has its output.

    Functions of a test (``extract``, ``sanity``) are called with it; a test's own ``run`` has the same names.
    """

    folder: Path
    log: Path
    artifacts: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """What the program printed, standard output and error line by line as they came; of several ranks, what their launcher did."""
        return self.log.read_bytes().decode("utf-8", "replace") if self.log.is_file() else ""

    @property
    def errors(self) -> str:
        """What the program wrote to its standard error, at most 1 MiB; of several ranks, what their launcher passed on.

        Raises:
            RunFailure: nobody knows, as the program was the command of its container.
        """
        from pytest_mlhpc.errors import RunFailure

        if self.log.name == "container.log":
            text = "the log of a container has standard output and error in one, and no agent was there to part them"
            raise RunFailure("no_result", f"{text}; look into run.output")
        log = self.log.with_name("errors.log")
        return log.read_bytes().decode("utf-8", "replace") if log.is_file() else ""

    @property
    def ranks(self) -> tuple[RankFiles, ...]:
        """What each rank printed, in their order: ``run.ranks[3].output``, ``.errors``.

        Raises:
            RunFailure: nobody knows, as the launcher does not say which rank printed a line.
        """
        from pytest_mlhpc.errors import RunFailure

        of_output, of_errors = (
            _index(self.log.with_name(f"{name}-ranks.log")) for name in ("output", "errors")
        )
        if of_output is not None and of_errors is not None:
            count = 1 + max((rank for rank, _ in (*of_output, *of_errors)), default=-1)
            errors = self.log.with_name("errors.log")
            outputs, errors_of = (
                _texts_of_ranks(self.log, of_output, count),
                _texts_of_ranks(errors, of_errors, count),
            )
            return tuple(map(RankFiles, outputs, errors_of))
        own = sorted(self.log.parent.glob("rank*.log"), key=lambda path: (len(path.name), path.name))
        if self.log.name in {"launcher.log", "container.log"} and not own:
            text = f"nobody knows which rank printed a line of {self.log.name}: its launcher does not say"
            raise RunFailure("no_result", f"{text}; look into run.output")
        if len(own) > 1 or self.log.name == "launcher.log":
            return tuple(RankFiles(path.read_bytes().decode("utf-8", "replace"), "") for path in own)
        return (RankFiles(self.output, self.errors),)

    def path(self, name: str) -> Path:
        """Return where the artifact *name* lies, a path in the folder of the run.

        Raises:
            RunFailure: the program has not written it, or the test does not name it among its ``artifacts``.
        """
        from pytest_mlhpc.errors import RunFailure
        from pytest_mlhpc.node.run_files import artifacts_of, find_artifact, matching

        if not matching([name], self.artifacts):
            known = ", ".join(self.artifacts) or "none"
            example = f"artifacts=[{name!r}]"
            text = f"{name!r} is no artifact of the test (it has {known}); add {example} to its decorator"
            raise RunFailure("no_result", text)
        try:
            found = find_artifact(self.folder, name, self.artifacts)
        except (OSError, tarfile.TarError) as error:
            raise RunFailure("no_result", f"the artifacts in {self.folder} cannot be read: {error}") from None
        if found is None:
            there = ", ".join(artifacts_of(self.folder, self.artifacts)) or "none"
            text = f"the program wrote no {name!r} into {self.folder}; artifacts there: {there}"
            raise RunFailure("no_result", text)
        return found

    def text(self, name: str) -> str:
        """Return the content of the artifact *name* as text."""
        return self.path(name).read_text("utf-8", "replace")

    def json(self, name: str) -> Any:
        """Return the content of the artifact *name*, a JSON file.

        Raises:
            RunFailure: it is missing, or no JSON.
        """
        from pytest_mlhpc.errors import RunFailure

        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise RunFailure("metric_invalid", f"{self.path(name)} is no JSON: {error}") from None


def call(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the functions of a test find in a run, and why those that fail do."""
    run = RunFiles(Path(request["folder"]), Path(request["log"]), tuple(request["artifacts"]))
    try:
        metrics, conditions = _functions(request["functions"])
    except Exception as error:  # noqa: BLE001 - a file of the user's
        return {"broken": f"{request['functions']}: {_error_text(error)}"}
    samples, errors, unsound = {}, {}, ""
    for condition in conditions if request["checks"] else ():
        try:
            if not condition(run):
                unsound = f"{condition.__qualname__} returned nothing that is true"
        except Exception as error:  # noqa: BLE001 - a function of the user's
            unsound = f"{condition.__qualname__}: {_error_text(error)}"
        if unsound:
            break
    for name in request["metrics"]:
        if name not in metrics:
            errors[name] = f"the decorator of {request['functions']} has no Metric({name!r}, extract=...)"
            continue
        try:
            samples[name] = _samples(metrics[name](run))
        except Exception as error:  # noqa: BLE001 - as above
            errors[name] = _error_text(error)
    return {"samples": samples, "errors": errors, "unsound": unsound}


def _samples(found: object) -> list[object]:
    """Return the samples among what a function returned: a number or text, or several."""
    alone = (
        not isinstance(found, Iterable)
        or isinstance(found, (str, bytes, Mapping))
        or getattr(found, "ndim", 1) == 0
    )
    values: list[Any] = [found] if alone else list(found)  # type: ignore[call-overload]  # it is iterable then
    plain: list[object] = [
        value if isinstance(value, (int, str)) or value is None else float(value) for value in values
    ]
    if None in plain:
        raise TypeError("it returned None, expected a number or a list of numbers")
    return plain


def _functions(reference: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the functions of metrics, by name, and those of sanity of the test ``/path/test_a.py::TestA::test_a``."""
    import importlib

    from pytest_mlhpc.jobs.decorators import MARK
    from pytest_mlhpc.jobs.programs import conditions_of

    file, *names = reference.split("::")
    path = Path(file)
    base, parts = path.parent, [path.stem]
    while (base / "__init__.py").exists():  # as pytest imports it: from the first folder that is no package
        base, parts = base.parent, [base.name, *parts]
    sys.path.insert(0, str(base))
    holders: list[Any] = [importlib.import_module(".".join(parts))]
    for name in names:
        holders.append(getattr(holders[-1], name))
    for holder in reversed(holders):
        marks = getattr(holder, "pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            if mark.name == MARK:
                fields = mark.args[0].fields
                found = {one.name: one.extract for one in fields["metrics"] if one.extract is not None}
                return found, [one for one in conditions_of(fields.get("sanity", ())) if callable(one)]
    raise LookupError("it is not decorated by @program")


def _error_text(error: BaseException) -> str:
    """Return what an exception says, and the line of the user's that raised it."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if one.filename != __file__]
    place = f" ({Path(own[0].filename).name}:{own[0].lineno}: {own[0].line})" if own else ""
    return f"{type(error).__name__}: {str(error) or 'no message'}{place}"[:1000]


def main() -> int:
    """Answer the one request on standard input."""
    request = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(request["limit_s"]) + GRACE_S)
    if "functions" not in request:
        with open(request["path"], encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a light script
            text = file.read()
        json.dump(search(request["patterns"], text), sys.stdout)
        return 0
    answer = os.dup(1)
    os.dup2(2, 1)  # what a function prints is no answer
    sys.path[:] = request["sys_path"]
    with os.fdopen(answer, "w") as out:
        json.dump(call(request), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
