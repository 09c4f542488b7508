"""What the state directory holds, and what of it goes as it grows old: samples of records, and folders of runs.

Whatever is in doubt is left as it is and named: what may still be written, what another user owns, links, damaged lines. A
record file is replaced whole, and a folder is renamed before it is removed. So a next run finishes what was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.influx.cursor import Cursor, line_digest, present_cursor, write_cursor
from pytest_mlhpc.jobs.ledger_files import sessions_in_ledgers
from pytest_mlhpc.node.files import UNFINISHED, read_json
from pytest_mlhpc.store.locations import LEFT_AFTER_S, replace_file
from pytest_mlhpc.store.record import without_samples
from pytest_mlhpc.store.store import MAX_LINE, json_line, month_of, record_of
from pytest_mlhpc.store.text import count, iso, quantity, table

#: What was written since then may be written again, also by a process that no ledger names.
RECENT_NS = 86_400 * 10**9
#: Beginning of the name of a run folder that is being removed.
REMOVED = ".removed-"
#: A list of two numbers and more behind one of the names that :func:`without_samples` empties.
_SAMPLES = re.compile(rb'"(?:samples|step_times_s|losses|seconds)"\s*:\s*\[[^\],]*,')
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}\Z")
#: So many lines of one list are for people; --json has all.
_MOST = 12


# --- pruning


@dataclass(frozen=True)
class Cutoff:
    """What is old enough to be pruned: made before ``before_ns``, by no session that is open or the newest."""

    before_ns: int
    now_ns: int
    open_sessions: frozenset[str] = frozenset()
    newest_session: str = ""

    def why_not(self, session: str, mtime_ns: int) -> str:
        """Return why nothing of *session* is pruned, which was last written at *mtime_ns*; empty if it may be."""
        if mtime_ns > self.now_ns:
            return "it is dated in the future"
        if session in self.open_sessions:
            return "its session is open in the ledger"
        if session == self.newest_session:
            return "it is of the newest session"
        return "it was written within the last day" if mtime_ns > self.now_ns - RECENT_NS else ""


@dataclass
class PruneReport:
    """What was pruned, or would be. ``freed``: bytes by which files became shorter, and those on disk of removed ones."""

    before_ns: int
    dry_run: bool = False
    records: int = 0
    sessions: set[str] = field(default_factory=set)
    folders: int = 0
    freed: int = 0
    other_users: int = 0
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return in one sentence what was pruned."""
        would, be = ("would prune", "would be freed") if self.dry_run else ("pruned", "freed")
        day = iso(self.before_ns)[:10]
        if not (self.records or self.folders or self.freed):
            return f"nothing older than {day} is there to prune"
        pieces = []
        if self.records:
            sessions = count(len(self.sessions), "session")
            pieces.append(f"samples of {count(self.records, 'record')} of {sessions}")
        if self.folders:
            pieces.append(count(self.folders, "run folder"))
        what = " and ".join(pieces) or "what a killed run has left"
        return f"{would} {what} older than {day}: {quantity(self.freed, 'B')} {be}"

    def text(self) -> str:
        """Return it for people, with what was left as it is and what failed."""
        lines = [self.summary()]
        if self.left:
            they = "it is" if len(self.left) == 1 else "they are"
            lines += [f"{count(len(self.left), 'place')} left as {they}:", *_some(self.left)]
        if self.other_users:
            lines.append(
                f"{count(self.other_users, 'file or folder', 'files and folders')} of other users left"
            )
        if self.failed:
            lines += [f"{count(len(self.failed), 'failure')}:", *_some(self.failed)]
        return "".join(f"{line}\n" for line in lines)

    def to_json(self) -> Mapping[str, object]:
        """Return it for programs."""
        return {
            "before": iso(self.before_ns),
            "dry_run": self.dry_run,
            "records": self.records,
            "sessions": len(self.sessions),
            "folders": self.folders,
            "freed": self.freed,
            "other_users": self.other_users,
            "left": self.left,
            "failed": self.failed,
        }


def _some(lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - _MOST:,} more; --json has them all"] if len(lines) > _MOST else []
    return [*(f"  {line}" for line in lines[:_MOST]), *more]


def prune(
    state_dir: Path, before_ns: int, *, now_ns: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Drop samples of records, and remove folders of runs, that are older than *before_ns*; only this user's."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    report = PruneReport(before_ns, dry_run)
    try:
        sessions = sessions_in_ledgers(state_dir)
    except StoreError as error:
        report.failed.append(f"{error}; which sessions are open is not known, so nothing is pruned")
        return report
    found = list(_record_files(state_dir, now_ns, report))
    times = ((info.st_mtime_ns, path.stem) for path, info in found if info.st_mtime_ns <= now_ns)
    cutoff = Cutoff(before_ns, now_ns, sessions, max(times, default=(0, ""))[1])
    last = month_of(before_ns)
    for path, info in found:
        if path.parent.name <= last:
            _prune_file(state_dir, path, info, cutoff, report)
    _prune_runs(state_dir / "runs", cutoff, report)
    return report


def _record_files(state_dir: Path, now_ns: int, report: PruneReport) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all record files, and remove what a killed replacement has left. No link is followed."""
    for month, _ in _entries(state_dir / "records", report):
        if not _MONTH.match(month.name):
            continue
        for path, info in _entries(month, report):
            if path.suffix == ".jsonl" and not path.name.startswith("."):
                yield path, info
            elif path.name.startswith(".") and path.name.endswith(UNFINISHED) and not report.dry_run:
                changed_s = max(info.st_mtime_ns, info.st_ctime_ns) / 1e9
                if _is_ours(info) and changed_s < now_ns / 1e9 - LEFT_AFTER_S:
                    with contextlib.suppress(OSError):  # another process removes it as well
                        path.unlink()
                        report.freed += info.st_blocks * 512


def _entries(folder: Path, report: PruneReport) -> list[tuple[Path, os.stat_result]]:
    """Return what lies in *folder*, by name. A link to a folder is none."""
    found = []
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            report.left.append(f"{folder}: it is a link, or no folder")
            return []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed a moment ago
                    found.append((folder / entry.name, entry.stat(follow_symlinks=False)))
    except FileNotFoundError:
        pass
    except OSError as error:
        report.failed.append(f"{folder}: cannot be listed: {error.strerror}")
    return sorted(found, key=lambda one: one[0])


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid()


@dataclass
class RecordRewrite:
    """The lines of a record file as they stay. ``sent`` is how far it was sent to InfluxDB, ``sent_after`` the same then."""

    path: Path
    before_ns: int
    sent: int = 0
    records: int = 0
    size_before: int = 0
    size: int = 0
    sent_after: int = 0
    first_line: bytes = b""
    damage: list[str] = field(default_factory=list)

    def lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the lines of *file*, old records without samples; what is no whole line stays as it is."""
        whole = True
        while line := file.readline(MAX_LINE):
            begins, whole = whole, line.endswith(b"\n")
            new = line
            if begins and whole:
                new = self._line(line)
            elif begins:
                self.damage.append(f"{self.path}: byte {self.size_before}: a line without an end")
            if whole and not self.first_line and new.strip():
                self.first_line = new
            self.size_before += len(line)
            self.size += len(new)
            if self.size_before == self.sent:
                self.sent_after = self.size
            yield new

    def _line(self, line: bytes) -> bytes:
        if not _SAMPLES.search(line):
            return line
        try:
            data = without_samples(read_json(line))
            created_ns = record_of(data).created_ns
        except ValueError as error:  # SchemaError is one
            self.damage.append(f"{self.path}: byte {self.size_before}: {str(error)[:200]}")
            return line
        new = json_line(data)
        if created_ns >= self.before_ns or len(new) >= len(line):
            return line
        self.records += 1
        return new


def _prune_file(
    state_dir: Path, path: Path, info: os.stat_result, cutoff: Cutoff, report: PruneReport
) -> None:
    if not _is_ours(info):
        report.other_users += 1
        return
    if not stat.S_ISREG(info.st_mode):
        report.left.append(f"{path}: it is no regular file")
        return
    rewrite = RecordRewrite(path, cutoff.before_ns)
    try:
        with _opened(path, info) as file:
            for _ in rewrite.lines(file):
                pass
            report.left += rewrite.damage
            if not rewrite.records:
                return
            if why := cutoff.why_not(path.stem, info.st_mtime_ns):
                report.left.append(f"{path}: {why}")
                return
            if not report.dry_run:
                file.seek(0)
                _replace(state_dir, path, info, file, cutoff.before_ns)
    except StoreError as error:
        report.failed.append(str(error))
        return
    except OSError as error:
        report.failed.append(f"{path}: cannot be read: {error.strerror}")
        return
    report.records += rewrite.records
    report.sessions.add(path.stem)
    report.freed += rewrite.size_before - rewrite.size


def _opened(path: Path, info: os.stat_result) -> IO[bytes]:
    """Open the regular file that was found at *path*, and nothing that has taken its place."""
    file = open(path, "rb", opener=_no_link)  # noqa: SIM115 - the caller closes it; pathlib has no opener
    if not os.path.samestat(os.fstat(file.fileno()), info):
        file.close()
        raise StoreError(f"{path}: it was replaced meanwhile; run it again")
    return file


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _replace(state_dir: Path, path: Path, info: os.stat_result, file: IO[bytes], before_ns: int) -> None:
    """Replace *path* by its lines without samples, with the same mode, group and time; its cursor for InfluxDB follows.

    A kill in between leaves a cursor from which the same points are sent again.
    """
    name = str(path.relative_to(state_dir / "records"))
    cursor = _cursor(state_dir, name)
    rewrite = RecordRewrite(path, before_ns, sent=cursor.offset if cursor else 0)

    def ready(descriptor: int) -> None:
        found = path.lstat()
        if (found.st_ino, found.st_size, found.st_mtime_ns) != (info.st_ino, info.st_size, info.st_mtime_ns):
            raise StoreError(f"{path}: it has changed meanwhile and is left as it is; run it again")
        with contextlib.suppress(OSError):  # a group that is no longer ours
            os.fchown(descriptor, -1, info.st_gid)
        os.utime(descriptor, ns=(info.st_atime_ns, info.st_mtime_ns))
        if cursor is not None:  # of neither file could bytes that were sent be told from others
            write_cursor(state_dir, name, replace(cursor, offset=0))

    mode = stat.S_IMODE(info.st_mode)
    replace_file(path, rewrite.lines(file), follow=False, mode=mode, ready=ready)
    if cursor is not None:
        first, mtime_ns = line_digest(rewrite.first_line), path.lstat().st_mtime_ns
        moved = replace(cursor, first_line=first, offset=rewrite.sent_after, mtime_ns=mtime_ns)
        write_cursor(state_dir, name, moved)


def _cursor(state_dir: Path, name: str) -> Cursor | None:
    """Return how far a record file was sent; None also where that is not known, as all of it will be sent again then."""
    try:
        return present_cursor(state_dir, name)
    except (StoreError, OSError):
        return None


def _prune_runs(runs: Path, cutoff: Cutoff, report: PruneReport) -> None:
    for path, info in _entries(runs, report):
        if not stat.S_ISDIR(info.st_mode):
            if path.is_symlink():
                report.left.append(f"{path}: it is a link")
        elif path.name.startswith(REMOVED):
            if _is_ours(info):  # a run that removed it was killed
                space = _space_of(path)
                if report.dry_run or _remove_tree(path, report):
                    report.folders += 1
                    report.freed += space.allocated
        elif info.st_mtime_ns >= cutoff.before_ns and info.st_mtime_ns <= cutoff.now_ns:
            continue
        elif not _is_ours(info):
            report.other_users += 1
        else:
            _prune_run(path, info, cutoff, report)


def _prune_run(path: Path, info: os.stat_result, cutoff: Cutoff, report: PruneReport) -> None:
    """Remove the folder of a session if nothing in it is newer, another user's, or not to be read."""
    space, newest_ns, foreign = SpaceUsed(), info.st_mtime_ns, False
    unreadable: list[OSError] = []
    for _, found in below(path, unreadable):
        space.add(found)
        newest_ns = max(newest_ns, found.st_mtime_ns)
        foreign = foreign or not _is_ours(found)
    if cutoff.before_ns <= newest_ns <= cutoff.now_ns:
        return
    why = cutoff.why_not(path.name, newest_ns)
    if foreign:
        why = why or "it holds files of other users"
    if unreadable:
        why = why or f"{unreadable[0].filename} cannot be read: {unreadable[0].strerror}"
    if why:
        report.left.append(f"{path}: {why}")
        return
    if report.dry_run or _remove(path, info, report):
        report.folders += 1
        report.freed += space.allocated + info.st_blocks * 512


def _remove(path: Path, info: os.stat_result, report: PruneReport) -> bool:
    """Rename the folder and remove it; return whether all of it is gone."""
    aside = path.with_name(f"{REMOVED}{secrets.token_hex(8)}")
    try:
        path.rename(aside)
        if not os.path.samestat(aside.lstat(), info):
            aside.rename(path)
            report.left.append(f"{path}: it was replaced meanwhile")
            return False
    except OSError as error:
        report.failed.append(f"{path}: cannot be removed: {error.strerror}")
        return False
    return _remove_tree(aside, report)


def _remove_tree(path: Path, report: PruneReport) -> bool:
    """Remove the folder; return whether all of it is gone."""
    errors: list[OSError] = []
    shutil.rmtree(path, onerror=lambda _call, _path, found: errors.append(found[1]))  # type: ignore[arg-type]  # it removes files
    if errors:
        report.failed.append(f"{errors[0].filename}: cannot be removed: {errors[0].strerror}")
    return not errors


# --- usage


@dataclass
class SpaceUsed:
    """Files, their bytes on disk (with those of folders), and their length."""

    files: int = 0
    allocated: int = 0
    apparent: int = 0

    def add(self, info: os.stat_result) -> None:
        """Add a file or folder."""
        self.allocated += info.st_blocks * 512
        if not stat.S_ISDIR(info.st_mode):
            self.files += 1
            self.apparent += info.st_size


#: Beginning of the name of what lies in the state directory -> what it is called.
_KINDS = {
    "records": "records", "runs": "run folders", "payload": "payloads", "ledger": "ledgers", "vetting": "vetting journals",
    "index-": "index", "changes-": "index", "cache": "caches", "builds": "builds", "influx": "InfluxDB", "alerts": "alerts",
}  # fmt: skip


def kind_of(name: str) -> str:
    """Return what the file or folder *name* in the state directory holds."""
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "other")


@dataclass
class UsageReport:
    """What the state directory holds, by kind and by month: a record's, or in which another file was last written."""

    state_dir: Path
    pruned: PruneReport
    kinds: dict[str, SpaceUsed] = field(default_factory=lambda: defaultdict(SpaceUsed))
    months: dict[str, SpaceUsed] = field(default_factory=lambda: defaultdict(SpaceUsed))
    total: SpaceUsed = field(default_factory=SpaceUsed)
    other_users: int = 0  #: files of theirs, counted above
    unreadable: list[OSError] = field(default_factory=list)  #: folders that are not counted

    def text(self, older: str) -> str:
        """Return it for people; *older* is as it was typed."""
        rows = [("kind", "files", "on disk", "length")]
        rows += [_row(name, used) for name, used in _largest(self.kinds)]
        months = [("month", "files", "on disk", "length")]
        months += [_row(name, used) for name, used in _largest(self.months)[:_MOST]]
        lines = []
        if len(self.months) > _MOST:
            lines.append(f"and {len(self.months) - _MOST} more months; --json has them all")
        if self.other_users:
            lines.append(f"of these, {count(self.other_users, 'file')} of other users")
        if self.unreadable:
            lines.append(f"{count(len(self.unreadable), 'folder')} not counted, as this user may not read it")
        lines += [f"`mlhpc records prune --older {shlex.quote(older)}`: {self.pruned.summary()}"]
        tables = f"{table([*rows, _row('total', self.total)])}\n{table(months)}"
        return tables + "".join(f"{line}\n" for line in lines)

    def to_json(self) -> Mapping[str, object]:
        """Return it for programs, the largest first."""
        return {
            "kinds": [{"kind": name, **vars(used)} for name, used in _largest(self.kinds)],
            "months": [{"month": name, **vars(used)} for name, used in _largest(self.months)],
            "total": vars(self.total),
            "other_users": self.other_users,
            "unreadable": len(self.unreadable),
            "prune": self.pruned.to_json(),
        }


def _largest(used: Mapping[str, SpaceUsed]) -> list[tuple[str, SpaceUsed]]:
    return sorted(used.items(), key=lambda one: (-one[1].allocated, one[0]))


def _row(name: str, used: SpaceUsed) -> tuple[str, str, str, str]:
    return name, f"{used.files:,}", quantity(used.allocated, "B"), quantity(used.apparent, "B")


def usage(state_dir: Path, before_ns: int) -> UsageReport:
    """Return what the state directory holds, and what pruning what is older than *before_ns* would free."""
    report = UsageReport(state_dir, prune(state_dir, before_ns, dry_run=True))
    start = len(str(state_dir)) + 1
    for path, info in below(state_dir, report.unreadable):
        top, _, rest = path[start:].partition(os.sep)
        month = rest.partition(os.sep)[0] if top == "records" else ""
        for used in (
            report.kinds[kind_of(top)],
            report.months[month if _MONTH.match(month) else month_of(info.st_mtime_ns)],
            report.total,
        ):
            used.add(info)
        report.other_users += not _is_ours(info) and not stat.S_ISDIR(info.st_mode)
    return report


def _space_of(folder: Path) -> SpaceUsed:
    space = SpaceUsed()
    for _, info in below(folder, []):
        space.add(info)
    return space


def below(folder: Path, unreadable: list[OSError]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of all below *folder*, one folder after the other. No link is followed."""
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed a moment ago
                        continue
                    if stat.S_ISDIR(info.st_mode):
                        waiting.append(entry.path)
                    yield entry.path, info
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append(error)
