"""Slurm behind a login node: its commands are run there, and the folders of runs are copied to there and back.

The state directory is this machine's; nodes see ``shared_directory``. ``STATE/runs/S/A`` has its counterpart
``SHARED/runs/S/A``. What the controller writes is sent before a job is submitted. What the batch writes is fetched, and of a
run's files all come before the lines that tell of them: who reads the copies reads what nodes see.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.node import login_node
from pytest_mlhpc.node.files import (
    PRIVATE_FILE,
    make_private,
    read_json,
    read_private,
    replace_file,
    unwritten,
)
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.run_files import matching, safe
from pytest_mlhpc.provision.scheduler.allocation import BatchFiles, BatchUpdate
from pytest_mlhpc.provision.scheduler.client import (
    CALL_LIMIT_S,
    JobSubmission,
    SchedulerError,
    SchedulerJob,
    SchedulerUnavailable,
    SchedulerUnreachable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.slurm.commands import (
    DROPPED_PREFIXES,
    PRESERVED_VARIABLES,
    CliClient,
    CommandResult,
    displayed_command,
)
from pytest_mlhpc.provision.ssh import (
    RemoteAccount,
    RemoteError,
    RemoteHost,
    RemoteRefused,
    RemoteUnavailable,
    RemoteUnusable,
)

#: Most bytes that are sent with one allocation, and fetched of one of its files.
SENT_BYTES: Final = 256 * 1024 * 1024
FETCHED_BYTES: Final = 64 * 1024 * 1024

#: Bytes of a file in one request.
PIECE_BYTES: Final = 4 * 1024 * 1024

#: How long a piece of a file may take, in seconds: 4 MiB in two minutes are 35 kB/s.
PIECE_LIMIT_S: Final = 120.0

#: What is in an allocation's folder and is not fetched: data sets, builds, copies of what was sent.
_LEFT_THERE: Final = ("data", "builds", "files-")
#: Files that the controller writes: a copy that comes back could only be worse.
PLAN: Final = "plan.json"
_OURS: Final = frozenset({PLAN, "job.sh"})
#: Ends of the names of files that the batch and its ranks write for the controller.
_OF_BATCH: Final = (".log", ".json", ".jsonl", ".out")


class RemoteSlurmClient(CliClient):
    """Slurm's commands, run by the user's own account on a login node. See SlurmClient for what each method returns and raises.

    Jobs of that account are shown as this user's: whoever asks for its own jobs means those.

    Args:
        host: the login node.
        runs: the folders that jobs need; None where nothing is submitted.
    """

    def __init__(
        self, host: RemoteHost, runs: RemoteRuns | None = None, limit_s: float = CALL_LIMIT_S
    ) -> None:
        super().__init__({}, limit_s)
        self._host = host
        self._runs = runs

    def submit(self, submission: JobSubmission) -> str:
        """Send what the job needs, and submit it."""
        assert self._runs is not None  # noqa: S101 - who submits has them
        try:
            self._runs.send(submission.directory)
        except RemoteUnavailable as error:
            raise SchedulerUnusable(str(error)) from error  # nothing was submitted
        there = self._runs.there(submission.directory)
        script = f"{there}/{submission.script.name}"
        return super().submit(replace(submission, script=Path(script), directory=Path(there)))

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return jobs as CliClient does."""
        here, there = super()._own_uid(), self._own_uid()
        own = {there, self._login().user}
        found = super().jobs(ids=ids, names=names, user=there if user == here else user)
        return [
            replace(job, user=here if job.user in own else f"{job.user}@{self._host.destination}")
            for job in found
        ]

    def _own_uid(self) -> str:
        return str(self._login().uid)

    def _login(self) -> RemoteAccount:
        try:
            return self._host.login()
        except RemoteUnavailable as error:
            raise _slurm_error(error) from error

    def _call(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, directory: str = ""
    ) -> CommandResult:
        self.calls[argv[0]] += 1
        wanted = self._environ if environ is None else environ
        try:
            answer, output = self._host.ask(
                "run", argv=list(argv), directory=directory, limit_s=self._limit_s,
                keep=sorted(PRESERVED_VARIABLES), drop=list(DROPPED_PREFIXES), set=dict(wanted),
            )  # fmt: skip
        except RemoteRefused as error:
            kind = SchedulerUnusable if error.number == errno.ENOENT else SchedulerUnavailable
            raise kind(f"{error} ({displayed_command(argv)})") from error
        except RemoteUnavailable as error:
            raise _slurm_error(error) from error
        code, out = answer.get("code"), answer.get("out")
        if not isinstance(code, int) or not isinstance(out, int):
            raise SchedulerUnavailable(f"{self._host.destination} does not say how {argv[0]} ended")
        if code < 0:
            killed = f"{argv[0]} was killed by signal {-code}"
            raise SchedulerUnavailable(f"{self._host.destination}: {killed} ({displayed_command(argv)})")
        return CommandResult(
            code, output[:out].decode(errors="replace"), output[out:].decode(errors="replace")
        )


def _slurm_error(error: RemoteUnavailable) -> SchedulerError:
    return (SchedulerUnusable if isinstance(error, RemoteUnusable) else SchedulerUnreachable)(str(error))


class RemoteRuns:
    """The folders of runs on a cluster's file system, and their copies below the state directory.

    Args:
        host: the login node.
        state_dir: this machine's.
        shared: an absolute folder of the cluster that its nodes see.
    """

    def __init__(self, host: RemoteHost, state_dir: Path, shared: str) -> None:
        self._host = host
        self._here = state_dir
        self._shared = shared
        self.trouble = ""  #: why nothing comes at present
        self._used: set[Path] = set()

    def there(self, path: Path) -> str:
        """Return the counterpart of a folder or file below the state directory."""
        return f"{self._shared}/{self._relative(path)}"

    def plan(self, plan: Plan) -> Plan:
        """Return *plan* as nodes read it."""
        return replace(plan, directory=self.there(Path(plan.directory)))

    def copy_payload(self, payload: Path, session_dir: Path) -> Path:
        """Put the payload among what is sent with the session's jobs.

        Raises:
            OSError: it cannot be written.
        """
        copy = session_dir / "payload" / payload.name
        make_private(copy.parent)
        if not copy.exists():
            replace_file(copy, read_private(payload), mode=PRIVATE_FILE)
        return copy

    def files(self, plan: Plan) -> BatchFiles:
        """Return the files of a batch, whose copies are brought up to date before they are read."""
        return _FetchedFiles(self, plan)

    # --- to there

    def send(self, directory: Path) -> None:
        """Send an allocation's folder and its session's payload; what is there already is not sent again.

        Raises:
            ProvisionError: ``disk_full``, ``not_writable`` or ``unsafe_directory``: it cannot be written there; or it is too large.
            RemoteUnavailable: there is no connection.
        """
        self._used.add(directory)
        lines = directory.parent / "lines"
        files = [*_regular(directory.parent / "payload"), *_regular(directory)]
        if (size := sum(path.stat().st_size for path in files)) > SENT_BYTES:
            raise ProvisionError(
                "rejected",
                f"the files of {directory.name} have {size} bytes, by ssh go {SENT_BYTES}: put large ones on "
                f"{self._host.destination}, and name their paths there",
            )
        folders = [lines, directory, *(path for path in directory.iterdir() if path.is_dir())]
        try:
            self._host.ask("make", root=self._shared, paths=[self._relative(path) for path in folders])
            known = {
                (folder, name): size
                for folder in (directory, directory.parent / "payload")
                for name, size, _ in self._listed(folder, leave=())
            }
            for path in files:
                folder = directory if path.is_relative_to(directory) else path.parent
                name = path.relative_to(folder).as_posix()
                if name in _OURS or known.get((folder, name)) != path.stat().st_size:
                    self._put(path, self._content(path) if name in _OURS else path.read_bytes())
        except RemoteRefused as error:
            raise self._unwritten(error) from error
        except OSError as error:
            raise ProvisionError(
                unwritten(error), f"cannot read {error.filename}: {error.strerror}"
            ) from error

    def _content(self, path: Path) -> bytes:
        """Return what plan or job script is to hold there: the plan names its directory as nodes see it."""
        content = read_private(path)
        if path.name != PLAN:
            return content
        plan = read_json(content)
        return json.dumps({**plan, "directory": self.there(path.parent)}).encode("ascii")

    def put(self, path: Path) -> None:
        """Send one small file.

        Raises:
            RemoteError: it cannot be sent.
        """
        self._put(path, path.read_bytes())

    def _put(self, path: Path, content: bytes) -> None:
        mode = path.stat().st_mode & 0o700
        for at in range(0, max(1, len(content)), PIECE_BYTES):
            piece = content[at : at + PIECE_BYTES]
            self._host.ask(
                "put", piece, limit_s=PIECE_LIMIT_S, root=self._shared, path=self._relative(path), at=at,
                mode=mode, last=at + len(piece) == len(content),
            )  # fmt: skip

    def _unwritten(self, error: RemoteRefused) -> ProvisionError:
        outcome = unwritten(error.os_error) if error.number else "unsafe_directory"
        advice = f"free space there, or choose another shared_directory than {self._shared}"
        return ProvisionError(outcome, f"cannot write: {error}; {advice}")

    # --- from there

    def names(self, folder: Path) -> dict[str, set[str]]:
        """Return id -> suffixes of the files that batches have written (see ``list_batch_files``); none without a connection."""
        found: dict[str, set[str]] = {}
        try:
            for name, _, _ in self._listed(folder):
                allocation_id, _, suffix = name.rpartition(".")
                if not name.startswith("."):
                    found.setdefault(allocation_id, set()).add(suffix)
            self.trouble = ""
        except RemoteError as error:
            self.trouble = str(error)
        return found

    def pieces(self, files: Sequence[tuple[Path, int]]) -> Iterator[tuple[bytes, int, int] | None]:
        """Yield of each file (path here, offset) what follows there, its size and its time of change (ns); None: it is not there.

        Raises:
            RemoteError: they cannot be read.
        """
        wanted = [[self._relative(path), offset] for path, offset in files]
        answer, data = self._host.ask(
            "read", limit_s=PIECE_LIMIT_S, root=self._shared, files=wanted, most=PIECE_BYTES
        )
        found = answer.get("found")
        if not isinstance(found, list) or len(found) != len(files):
            raise RemoteUnavailable(f"{self._host.destination} sent another answer than was asked for")
        for one in found:
            if one is None:
                yield None
                continue
            if not (isinstance(one, list) and len(one) == 3 and all(map(_is_size, one))):
                raise RemoteUnavailable(f"{self._host.destination} sent another answer than was asked for")
            yield data[: one[0]], one[1], one[2]
            data = data[one[0] :]

    def fetch(self, directory: Path, runs: Mapping[str, RunPlan]) -> None:
        """Bring the copies of an allocation's files up to date: its logs and reports, and what its runs name as artifacts.

        Raises:
            RemoteError: they cannot be read, or one is too large.
            OSError: one cannot be written here.
        """
        for name, size, changed_ns in self._listed(directory):
            folder, _, inside = name.partition("/")
            run = runs.get(folder)
            wanted = name not in _OURS and "/" not in inside and name.endswith(_OF_BATCH)
            if not wanted and not (run is not None and matching([inside], run.artifacts)):
                continue
            path = directory / name
            if _is_same(path, size, changed_ns):
                continue
            if size > FETCHED_BYTES:
                raise RemoteRefused(
                    f"{self.there(path)} has {size} bytes, by ssh come {FETCHED_BYTES}: write less, or read it there",
                    errno.EFBIG,
                )
            self._fetch_one(path, size, changed_ns)

    def _fetch_one(self, path: Path, size: int, changed_ns: int) -> None:
        content = b""
        while len(content) < size:
            found = next(self.pieces([(path, len(content))]))
            if found is None or not found[0]:
                break  # it was made anew: its next listing has another time
            content += found[0]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content, mode=PRIVATE_FILE, durable=False)
        os.utime(path, ns=(changed_ns, changed_ns))

    def _listed(self, folder: Path, leave: Sequence[str] = _LEFT_THERE) -> Iterator[tuple[str, int, int]]:
        """Yield name, size and time of change (ns) of the regular files below the counterpart of *folder*, without what *leave* begins."""
        _, data = self._host.ask(
            "tree", limit_s=PIECE_LIMIT_S, root=self._shared, path=self._relative(folder), leave=leave
        )
        try:
            found = read_json(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or len(found) > login_node.MOST_FILES:
            raise RemoteUnavailable(f"{self._host.destination} sent what is no listing")
        for one in found:
            if isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and _is_name(one[0]):
                name, size, changed_ns = one
                if _is_size(size) and _is_size(changed_ns):
                    yield name, size, changed_ns

    # --- the end

    def remove(self, directories: Collection[Path]) -> None:
        """Remove the counterparts of allocations' folders that are not needed any more; those of a session, with its last one.

        Without a connection they stay: nothing reads them.
        """
        for directory in directories:
            if directory not in self._used:
                continue
            session = directory.parent
            lines = [session / "lines" / f"{directory.name}.{end}" for end in ("up", "jsonl", "over")]
            try:
                self._host.ask(
                    "remove", limit_s=PIECE_LIMIT_S, root=self._shared,
                    paths=[self._relative(path) for path in (directory, *lines)],
                    unless=self._relative(session / "lines"), last=self._relative(session),
                )  # fmt: skip
            except RemoteError as error:
                logging.getLogger("pytest_mlhpc").warning(
                    "%s was not removed: %s", self.there(directory), error
                )
                return
            self._used.discard(directory)

    def use(self, directory: Path) -> None:
        """Note that an allocation of an earlier session is this one's now."""
        self._used.add(directory)

    def close(self) -> None:
        """End the connection."""
        self._host.close()

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._here).as_posix()


class _FetchedFiles(BatchFiles):
    """The files of a batch, fetched before they are read."""

    def __init__(self, runs: RemoteRuns, plan: Plan) -> None:
        self._directory = Path(plan.directory)
        super().__init__(self._directory.parent / "lines", plan.allocation_id)
        self._remote = runs
        self._runs = {run.run_id: run for run in plan.runs}

    def read(self, *, over_exists: bool = True) -> BatchUpdate:
        """Return what is new, once it is here with the files that it tells of."""
        del over_exists  # a listing that is a moment old
        try:
            self._fetch()
        except RemoteRefused as error:
            return BatchUpdate(damage=str(error), tolerance_s=0.0 if error.number == errno.EFBIG else 120.0)
        except RemoteError as error:
            self._remote.trouble = str(error)
        except OSError as error:
            return BatchUpdate(damage=f"cannot write {error.filename}: {error.strerror}", tolerance_s=0.0)
        return super().read()

    def _fetch(self) -> None:
        known = self._lines.exists()
        have = self._lines.stat().st_size if known else 0
        over, up, lines = self._remote.pieces([(self._over, 0), (self._up, 0), (self._lines, have)])
        if lines is None and up is None and over is None:
            if not known:
                self._remote.fetch(self._directory, self._runs)  # a job may end before its batch begins
            else:
                self._lines.unlink()
            return
        new, size, changed_ns = lines or (b"", 0, 0)
        if lines is not None and size < have:
            os.truncate(self._lines, size)
        if over is None:
            new = new[: new.rfind(b"\n") + 1]  # a line comes whole, after the files that it may tell of
        if over is not None or any(b'"progress"' not in line for line in new.splitlines()):
            self._remote.fetch(self._directory, self._runs)
        make_private(self._lines.parent)
        if up is not None and not self._up.exists():
            replace_file(self._up, up[0], mode=PRIVATE_FILE, durable=False)
            os.utime(self._up, ns=(up[2], up[2]))
        if lines is not None:
            _append(self._lines, new, changed_ns)
        if over is not None and have + len(new) >= size:
            replace_file(self._over, over[0], mode=PRIVATE_FILE, durable=False)


def _append(path: Path, data: bytes, changed_ns: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "ab") as file:
        file.write(data)
    os.utime(path, ns=(changed_ns, changed_ns))


def _regular(folder: Path) -> list[Path]:
    """Return the regular files below *folder*, in one order; links are not followed."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if one != "data")
        found += [Path(where, name) for name in sorted(names) if not Path(where, name).is_symlink()]
    return found


def _is_same(path: Path, size: int, changed_ns: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_size == size and found.st_mtime_ns == changed_ns


def _is_name(name: str) -> bool:
    return (
        safe(name) and "\0" not in name and len(name) < 4096 and all(part != "." for part in name.split("/"))
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
