"""Old samples and run folders go, figures stay; what is in doubt is left; a kill at any line loses and doubles nothing."""

import dataclasses
import json
import os
import pickle
import shutil
import stat
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
from full_disk import Limited
from killed_lines import killed_at, moments
from ledgers import entry, later, left_behind
from nights_of import DAY, store
from old_records import (
    BEFORE_NS,
    NOW_NS,
    OLD_DAYS,
    dated,
    newest,
    run_folder,
    sampled,
    stored,
    without_samples,
)
from pushing import Server, push
from running_suites import Suite
from worlds import measurement

from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx.cursor import begin, cursor_path, restart, waiting
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.node import files as node_files
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.session import retention
from pytest_mlhpc.session.retention import below, prune, usage
from pytest_mlhpc.store import locations
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.store import Store, json_line, parse_record, read_records

TRACED = {module.__file__ for module in (retention, cursors, locations, node_files)}
US, OTHER, GROUP = 65501, 65502, 65500


def pruned(state_dir, **options):
    return prune(state_dir, BEFORE_NS, **{"now_ns": NOW_NS, **options})


def content(state_dir):
    """Return path, content and time of every file."""
    found = [path for path in sorted(state_dir.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


# --- records


def test_samples_of_old_records_go_and_their_figures_stay(state_dir):
    records = [sampled(number) for number in range(3)]
    path = stored(state_dir, records)
    newest(state_dir)
    before = path.stat()
    report = pruned(state_dir)
    assert (report.records, report.sessions, report.left, report.failed) == (3, {"old"}, [], [])
    found = [one for one in read_records(state_dir) if one.session != "s9000"]
    assert found == [without_samples(one) for one in records]
    assert report.freed == before.st_size - path.stat().st_size > 0.8 * before.st_size
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_a_pruned_record_lacks_observations_and_nothing_else():
    whole = to_json(sampled(1))
    found = to_json(without_samples(sampled(1)))
    for metric in whole["measurement"]["metrics"]:
        metric["samples"] = [110.0] if metric["name"] == "gemm_flops_fp32" else []
    (rank,) = whole["measurement"]["per_rank"]
    rank["step_times_s"] = rank["losses"] = whole["measurement"]["step_times_s"] = []
    rank["timed"][0]["seconds"] = rank["figures"][0]["samples"] = []
    assert found == whole


def test_a_pruned_record_has_the_same_points_in_influxdb():
    for one in (sampled(1), sampled(2, measurement=None, verdict="worker_exit", failure="it ended")):
        assert lines_of(without_samples(one)) == lines_of(one)


@pytest.mark.parametrize(
    "changes",
    [
        {"measurement": 5}, {"measurement": {"metrics": [7], "per_rank": 8}}, {"unknown": [1, 2]}, {"created_ns": "today"},
        {"measurement": {"metrics": [{"name": "a", "value": "x", "better": "higher", "samples": [1, 2]}]}},
        {"measurement": {"step_times_s": [1, "2"]}}, {"measurement": {"step_times_s": [1, True]}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_of_the_schema_stays_byte_for_byte(state_dir, changes):
    path = stored(state_dir, [sampled(1)])
    data = json.loads(path.read_bytes())
    if isinstance(more := changes.get("measurement"), dict):
        changes = {"measurement": {**data["measurement"], **more}}
    line = json_line({**data, **changes, "asked": {"samples": [1, 2]}})
    path.write_bytes(line)
    dated(path, OLD_DAYS)
    newest(state_dir)
    with pytest.raises(ValueError, match=r"Record|Measurement"):
        parse_record(line)
    report = pruned(state_dir)
    assert (path.read_bytes(), report.records, len(report.left)) == (line, 0, 1)


def test_newer_records_of_an_old_file_keep_their_samples(state_dir):
    records = [sampled(1, 731), sampled(2, 729)]
    path = stored(state_dir, records[:1])
    with path.open("ab") as file:
        file.write(json_line(to_json(records[1])))
    dated(path, 729)
    newest(state_dir)
    assert pruned(state_dir).records == 1
    assert list(read_records(state_dir))[:2] == [without_samples(records[0]), records[1]]


def test_a_second_run_finds_nothing_and_changes_nothing(state_dir):
    stored(state_dir, [sampled(1)])
    newest(state_dir)
    pruned(state_dir)
    before = content(state_dir)
    report = pruned(state_dir)
    assert report.text() == f"nothing older than {retention.iso(BEFORE_NS)[:10]} is there to prune\n"
    assert content(state_dir) == before


def test_a_dry_run_says_the_same_and_changes_nothing(state_dir):
    stored(state_dir, [sampled(1), sampled(2)])
    newest(state_dir)
    run_folder(state_dir, "gone")
    before = content(state_dir)
    would = pruned(state_dir, dry_run=True)
    assert content(state_dir) == before
    done = pruned(state_dir)
    assert would.text().startswith(
        "would prune samples of 2 records of 1 session and 1 run folder older than "
    )
    assert done.to_json() == {**would.to_json(), "dry_run": False}


def test_nothing_is_made_where_nothing_is(tmp_path):
    assert pruned(tmp_path / "none").failed == []
    assert usage(tmp_path / "none", BEFORE_NS).total.files == 0
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    pruned(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


# --- what is left as it is


def open_in_ledger(state_dir):
    left_behind(state_dir, "old", entry("allocation"))


def detached(state_dir):
    left_behind(state_dir, "old", entry("allocation"), until_ns=later())


def adopted(state_dir):
    left_behind(state_dir, "another", entry("allocation", session="old"))


def in_future(state_dir):
    dated(next(state_dir.glob("records/*/old.jsonl")), -2)
    dated(state_dir / "runs/old/allocation", -2)


def recent(state_dir):
    dated(next(state_dir.glob("records/*/old.jsonl")), 0.9)
    dated(next(state_dir.glob("records/*/newest.jsonl")), 0.1)


def newest_itself(state_dir):
    shutil.rmtree(next(state_dir.glob("records/*/newest.jsonl")).parent)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (open_in_ledger, "its session is open in the ledger"),
        (detached, "its session is open in the ledger"),
        (adopted, "its session is open in the ledger"),
        (in_future, "it is dated in the future"),
        (recent, "it was written within the last day"),
        (newest_itself, "it is of the newest session"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_may_still_be_used_is_left_and_named(state_dir, made, why):
    path = stored(state_dir, [sampled(1)])
    newest(state_dir)
    folder = run_folder(state_dir, "old")
    made(state_dir)
    before = path.read_bytes()
    report = pruned(state_dir)
    assert (path.read_bytes(), report.records, report.failed) == (before, 0, [])
    assert f"{path}: {why}" in report.left
    if made is not recent:
        assert (folder.exists(), report.folders) == (True, 0)
        assert f"{folder}: {why}" in report.left
    shutil.rmtree(state_dir / "ledger", ignore_errors=True)  # nothing was submitted


def test_a_ledger_that_cannot_be_read_leaves_everything(state_dir):
    stored(state_dir, [sampled(1)])
    newest(state_dir)
    (state_dir / "ledger").mkdir()
    (state_dir / "ledger/s.jsonl").write_text("{\n")
    before = content(state_dir)
    report = pruned(state_dir)
    assert content(state_dir) == before
    assert report.failed[0].endswith("which sessions are open is not known, so nothing is pruned")
    shutil.rmtree(state_dir / "ledger")


def test_damaged_lines_stay_as_they_are_and_are_named(state_dir):
    path = stored(state_dir, [sampled(1)])
    good = path.read_bytes()
    newer = json.dumps({**json.loads(good), "schema": 99}, separators=(",", ":")).encode() + b"\n"
    lines = [b"\n", b'{"samples":[1,2\n', newer, good, b"\0\0\n", good[:3000]]
    path.write_bytes(b"".join(lines))
    dated(path, OLD_DAYS)
    newest(state_dir)
    report = pruned(state_dir)
    found = path.read_bytes().split(b"\n")
    assert report.records == 1
    assert [*found[:3], found[4], found[5]] == [line.strip(b"\n") for line in (*lines[:3], *lines[4:])]
    where = [0, *(len(b"".join(lines[:number])) for number in range(1, 6))]
    assert [text.partition(": ")[2].partition(": ")[0] for text in report.left] == [
        f"byte {where[1]}",
        f"byte {where[2]}",
        f"byte {where[5]}",
    ]
    assert "schema 99 is newer" in report.left[1]


def test_an_enormous_line_stays_as_it_is(state_dir, monkeypatch):
    path = stored(state_dir, [sampled(1)])
    good = path.read_bytes()
    monkeypatch.setattr(retention, "MAX_LINE", len(good))
    enormous = b"x" * len(good) + good  # its second piece is a record by itself
    path.write_bytes(enormous + good)
    dated(path, OLD_DAYS)
    newest(state_dir)
    report = pruned(state_dir)
    assert path.read_bytes().startswith(enormous)
    assert len(path.read_bytes()) < len(enormous + good)
    assert report.left == [f"{path}: byte 0: a line without an end"]


def test_no_link_is_followed_and_nothing_waits_for_a_pipe(state_dir, tmp_path):
    month = stored(state_dir, [sampled(1)]).parent
    newest(state_dir)
    away = tmp_path / "away"
    outside = stored(away, [sampled(2)])
    run = run_folder(away, "far")
    (month / "link.jsonl").symlink_to(outside)
    os.mkfifo(month / "pipe.jsonl")
    (state_dir / "records/2001-01").symlink_to(outside.parent)
    folder = run_folder(state_dir, "near")
    (folder / "link").symlink_to(run)
    moment = NOW_NS - OLD_DAYS * DAY
    os.utime(folder / "link", ns=(moment, moment), follow_symlinks=False)
    os.utime(folder, ns=(moment, moment))
    (state_dir / "runs/link").symlink_to(run)
    before = content(away)
    report = pruned(state_dir)
    assert content(away) == before
    assert (report.records, report.folders, folder.exists()) == (1, 1, False)
    assert [text.partition(": ") for text in report.left] == [
        (str(state_dir / "records/2001-01"), ": ", "it is a link, or no folder"),
        (str(month / "link.jsonl"), ": ", "it is no regular file"),
        (str(month / "pipe.jsonl"), ": ", "it is no regular file"),
        (str(state_dir / "runs/link"), ": ", "it is a link"),
    ]


def test_a_records_folder_that_is_a_link_is_left(state_dir, tmp_path):
    outside = stored(tmp_path / "away", [sampled(1), sampled(2)])
    state_dir.mkdir()
    (state_dir / "records").symlink_to(outside.parents[1])
    before = outside.read_bytes()
    assert pruned(state_dir).left == [f"{state_dir / 'records'}: it is a link, or no folder"]
    assert outside.read_bytes() == before


def test_a_file_that_grows_meanwhile_is_left_and_named(state_dir, monkeypatch):
    path = stored(state_dir, [sampled(1)])
    newest(state_dir)
    rewritten = retention.RecordRewrite.lines

    def growing(self, file):
        yield from rewritten(self, file)
        store(state_dir, [sampled(2)], "old")

    monkeypatch.setattr(retention.RecordRewrite, "lines", growing)
    report = pruned(state_dir)
    assert report.failed == [f"{path}: it has changed meanwhile and is left as it is; run it again"]
    assert [one.id for one in read_records(state_dir)][:2] == [sampled(1).id, sampled(2).id]


def test_a_full_disk_leaves_the_file_and_is_named(state_dir):
    path = stored(state_dir, [sampled(number) for number in range(5)])
    newest(state_dir)
    before = path.read_bytes()
    with Limited().full(1000):
        report = pruned(state_dir)
    assert report.failed == [f"{path}: cannot be written: File too large"]
    assert (path.read_bytes(), report.records) == (before, 0)
    assert list(path.parent.glob(".*")) == []
    assert pruned(state_dir).records == 5


# --- run folders


def test_run_folders_of_ended_sessions_go_and_the_rest_stays(state_dir):
    newest(state_dir)
    old, young, part = (run_folder(state_dir, name) for name in ("old", "young", "part"))
    own = run_folder(state_dir, "newest")
    dated(young, 100)
    dated(part / "allocation/logs/rank-0.log", 100)
    report = pruned(state_dir)
    assert [path.exists() for path in (old, young, part, own)] == [False, True, True, True]
    assert (report.folders, report.freed >= 20_000) == (1, True)
    assert report.left == [f"{own}: it is of the newest session"]
    assert list(state_dir.glob(f"runs/{retention.REMOVED}*")) == []


def test_a_removal_that_was_killed_is_gone_on_with_and_counted(state_dir):
    newest(state_dir)
    folder = run_folder(state_dir, "gone")
    folder.rename(folder.with_name(f"{retention.REMOVED}1"))
    assert pruned(state_dir, dry_run=True).summary().startswith("would prune 1 run folder older than ")
    assert pruned(state_dir).summary().startswith("pruned 1 run folder older than ")
    assert list((state_dir / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_renamed_is_named_and_the_rest_is_done(state_dir, monkeypatch):
    newest(state_dir)
    first, second = run_folder(state_dir, "a"), run_folder(state_dir, "b")
    rename = Path.rename

    def refusing(self, target):
        if self == first:
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    report = pruned(state_dir)
    assert report.failed == [f"{first}: cannot be removed: Operation not permitted"]
    assert (first.exists(), second.exists()) == (True, False)


# --- killed at any line


def test_pruning_that_is_killed_at_any_line_loses_and_doubles_nothing(tmp_path):
    records = [sampled(1), sampled(2), sampled(3, 10)]

    whole_dir = tmp_path / "whole"
    restart(whole_dir, 0)
    stored(whole_dir, records[:2])
    stored(whole_dir, records[2:], "recent", 10)
    newest(whole_dir)
    push(Server(), whole_dir)
    run_folder(whole_dir, "gone")
    whole = {one.id: one for one in read_records(whole_dir)}

    def make(name):
        return Path(shutil.copytree(whole_dir, tmp_path / name))

    state_dir = make("first")
    numbers = moments(TRACED, state_dir, lambda: pruned(state_dir))
    assert len(numbers) > 12
    for number in numbers:
        state_dir = make(str(number))
        assert killed_at(TRACED, number, lambda: pruned(state_dir))  # noqa: B023 - it is called at once
        found = list(read_records(state_dir))
        assert len(found) == len(whole)
        assert {without_samples(one).id: without_samples(one) for one in found} == {
            name: without_samples(one) for name, one in whole.items()
        }
        pruned(state_dir)
        assert [one for one in read_records(state_dir) if one.id in {r.id for r in records[:2]}] == [
            without_samples(one) for one in records[:2]
        ]
        server = Server()
        push(server, state_dir)
        assert len(server.values) in {0, 6}
        assert waiting(state_dir).both == 0
        pruned(state_dir, now_ns=NOW_NS + 2 * DAY)
        assert [path for path, _ in below(state_dir / "runs", [])] == []
        assert list(state_dir.glob("records/*/.*")) == []
        shutil.rmtree(state_dir)


# --- who reads while files are replaced


def test_a_cursor_follows_a_file_that_was_sent(state_dir):
    restart(state_dir, 0)
    path = stored(state_dir, [sampled(1), sampled(2)])
    newest(state_dir)
    push(Server(), state_dir)
    assert pruned(state_dir).records == 2
    server = Server()
    assert push(server, state_dir)[1] == []
    assert server.requests == []
    cursor = json.loads(cursor_path(state_dir, str(path.relative_to(state_dir / "records"))).read_text())
    assert cursor["offset"] == path.stat().st_size


def test_what_was_there_before_influxdb_is_not_sent_as_it_was_pruned(state_dir):
    stored(state_dir, [sampled(1), sampled(2)])
    newest(state_dir)
    begin(state_dir, lambda _text: None)
    assert pruned(state_dir).records == 2
    server = Server()
    assert push(server, state_dir)[1] == []
    assert (server.requests, waiting(state_dir).both) == ([], 0)


def test_of_a_file_that_was_sent_in_part_the_rest_is_sent(state_dir):
    restart(state_dir, 0)
    failed = dataclasses.replace(sampled(1), measurement=None, verdict="worker_exit")
    stored(state_dir, [failed, sampled(2, value=2.0)])
    newest(state_dir)
    push(Server(), state_dir)
    path = stored(state_dir, [sampled(3, value=3.0), sampled(4, value=4.0)])
    assert pruned(state_dir).records == 3
    server = Server()
    push(server, state_dir)
    rates = [value for value in server.values if value in {2.0, 3.0, 4.0, 100.0}]
    assert sorted({*rates} - {100.0}) == [3.0, 4.0]
    assert waiting(state_dir).both == 0
    assert path.read_bytes().count(b"\n") == 4


def test_an_index_follows_a_replaced_file_also_in_the_middle_of_a_question(state_dir):
    failed = dataclasses.replace(sampled(1), measurement=None, verdict="worker_exit")
    path = stored(state_dir, [failed, *(sampled(number) for number in range(2, 6))])
    newest(state_dir)
    problems = []
    with closing(Index(state_dir, problems.append, patience_s=0)) as index:
        rows = index.ask("SELECT path, start, record_id FROM records ORDER BY record_id", {})
        ids = [one.id for one in index.since(0)]
        inode = path.stat().st_ino
        pruned(state_dir)
        assert path.stat().st_ino != inode
        assert [one.id for one in index.read(rows)] == [row[2] for row in rows]
        assert [one.id for one in index.since(0)] == ids
        assert [one.measurement for one in index.newest(session="s2")] == [
            without_samples(sampled(2)).measurement
        ]
    assert problems == []


def test_a_record_that_is_gone_from_its_file_is_named(state_dir):
    path = stored(state_dir, [sampled(1), sampled(2)])
    problems = []
    with closing(Index(state_dir, problems.append, patience_s=60)) as index:
        assert len(index.since(0)) == 2
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])
        assert [one.id for one in index.since(0)] == [sampled(2).id]
    assert problems == [f"{path}: byte 0: record {sampled(1).id} is not there any more"]


def test_a_session_whose_file_was_replaced_appends_to_the_new_one(state_dir):
    newest(state_dir)
    with closing(Store(state_dir, "long")) as writer:
        writer.append(sampled(1))
        dated(writer.path, OLD_DAYS)
        assert pruned(state_dir).records == 1
        writer.append(sampled(2))
    found = {one.id for one in read_records(state_dir)}
    assert {sampled(1).id, sampled(2).id} <= found


# --- a real session


def test_what_a_real_session_has_left_is_pruned_years_later(state_dir, tmp_path):
    suite = Suite(tmp_path / "suite", state_dir, system="local")
    suite.tests("""
        @script("echo rate: 4; echo rate: 5; echo rate: 6")
        def test_it(run):
            assert run["rate"].value == 5
    """)
    for _ in range(2):
        suite.run().expect(0, passed=1)
    first, second = sorted((state_dir / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    before = {one.session: one for one in read_records(state_dir)}
    year = time.time_ns() + 365 * DAY
    report = prune(state_dir, year, now_ns=year + 365 * DAY)
    assert (report.records, report.folders, report.failed) == (1, 1, [])
    assert [path.name for path in (state_dir / "runs").iterdir()] == [second.name]
    assert {one.session: one for one in read_records(state_dir)} == {
        **before,
        first.name: without_samples(before[first.name]),
    }
    suite.run().expect(0, passed=1)


# --- usage


def test_usage_counts_each_kind_the_largest_first(state_dir, tmp_path):
    stored(state_dir, [sampled(number) for number in range(30)])
    newest(state_dir)
    run_folder(state_dir, "gone")
    (state_dir / "payload").mkdir()
    (state_dir / "payload/a.zip").write_bytes(b"x" * 400_000)
    (state_dir / "notes").write_text("mine")
    (tmp_path / "large").write_bytes(b"x" * 9_000_000)
    (state_dir / "payload/link").symlink_to(tmp_path / "large")
    before = content(state_dir)
    found = usage(state_dir, BEFORE_NS)
    assert content(state_dir) == before
    data = found.to_json()
    kinds = {row["kind"]: (row["files"], row["apparent"] > 0) for row in data["kinds"]}
    assert kinds == {
        "payloads": (2, True),
        "records": (2, True),
        "run folders": (1, True),
        "other": (1, True),
    }
    sizes = [row["allocated"] for row in data["kinds"]]
    assert sizes == sorted(sizes, reverse=True)
    assert data["total"]["allocated"] == sum(sizes) < 9_000_000
    assert (data["total"]["files"], data["prune"]["records"], data["prune"]["folders"]) == (6, 30, 1)
    assert {row["month"] for row in data["months"]} >= {path.name for path in state_dir.glob("records/*")}
    assert "would prune samples of 30 records of 1 session and 1 run folder" in found.text("2y")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("records", "records"), ("runs", "run folders"), ("payload-1000", "payloads"), ("ledger", "ledgers"),
        ("vetting", "vetting journals"), ("index-v3-0.sqlite", "index"), ("changes-v1-0.sqlite", "index"), ("cache", "caches"),
        ("builds", "builds"), ("influx", "InfluxDB"), ("alerts", "alerts"), ("events", "other"),
    ],
)  # fmt: skip
def test_each_kind_has_a_name(name, kind):
    assert retention.kind_of(name) == kind


# --- two users of one directory


def as_user(user, action):
    """Let a child that is *user* do it; return what that returned."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(GROUP)
            os.setuid(user)
            os.umask(0o002)
            os.write(write, pickle.dumps(action()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(found)  # noqa: S301 - our own child's


@pytest.fixture
def shared():
    """Return a state directory that a group shares."""
    folder = Path(tempfile.mkdtemp(prefix="mlhpc-test-", dir="/tmp"))
    os.chown(folder, OTHER, GROUP)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users")
def test_of_two_users_of_a_group_each_prunes_their_own(shared):
    pruned(shared)  # all modules are loaded
    for user, name in ((US, "ours"), (OTHER, "theirs")):
        as_user(user, lambda name=name: (stored(shared, [sampled(1)], name), run_folder(shared, name)))
    as_user(OTHER, lambda: newest(shared))
    theirs = next(shared.glob("records/*/theirs.jsonl"))
    before = theirs.read_bytes()
    report = as_user(US, lambda: pruned(shared))
    assert (report.records, report.folders, report.other_users, report.failed) == (1, 1, 2, [])
    assert theirs.read_bytes() == before
    assert (shared / "runs/theirs/allocation/logs/rank-0.log").exists()
    ours = next(shared.glob("records/*/ours.jsonl")).stat()
    assert (ours.st_uid, ours.st_gid, stat.S_IMODE(ours.st_mode)) == (US, GROUP, 0o664)
    found = as_user(US, lambda: usage(shared, BEFORE_NS).to_json())
    assert (found["other_users"], found["unreadable"]) == (2, 1)
    root = pruned(shared)
    assert (root.records, root.folders) == (0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_written_is_named_and_the_rest_is_done(shared):
    pruned(shared)
    as_user(US, lambda: (stored(shared, [sampled(1)]), newest(shared), run_folder(shared, "gone")))
    path = next(shared.glob("records/*/old.jsonl"))
    os.chown(path.parent, OTHER, GROUP)
    path.parent.chmod(0o755)
    before = path.read_bytes()
    report = as_user(US, lambda: pruned(shared))
    assert report.failed == [f"{path}: cannot be written: Permission denied"]
    assert (path.read_bytes(), report.records, report.folders) == (before, 0, 1)


def test_a_metric_without_samples_stays_as_it_is():
    one = sampled(1, measurement=measurement(5.0, step_times_s=()))
    assert without_samples(one) == one
