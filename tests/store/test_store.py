"""The record store: what survives torn lines, kills, full disks and several writers."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from full_disk import small_disk
from hypothesis import given
from nights_of import store as store_records
from odd_values import changed
from worlds import record

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.node.protocol.schema import SchemaError, to_json
from pytest_mlhpc.store import store
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import DRILL, Store, drill_of, parse_record, read_lines, read_records

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def stored(state_dir: Path) -> Callable[..., Path]:
    """Store records as a session does; return its file."""

    return lambda *records: store_records(state_dir, records)


@pytest.fixture
def read(state_dir: Path) -> Callable[[], tuple[list[Record], list[str]]]:
    """Read all records; return them, and what is said of damage."""

    def read_all() -> tuple[list[Record], list[str]]:
        problems: list[str] = []
        return list(read_records(state_dir, problems.append)), problems

    return read_all


def run(code: str, *arguments: object) -> str:
    """Run Python in a process of its own; return what it printed."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_a_record_comes_back_as_it_was_stored(state_dir, stored, read):
    path = stored(record(1), record(2))
    assert read() == ([record(1), record(2)], [])
    assert path.parent.parent == state_dir / "records"


def test_owners_are_in_a_record_and_empty_in_a_line_that_was_stored_before(stored, read):
    owned = dataclasses.replace(record(1), owner="ada, bob", partition_owner="@hpc/ops")
    path = stored(owned, record(2))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["owner"], first["partition_owner"]) == ("ada, bob", "@hpc/ops")
    older = {name: value for name, value in second.items() if "owner" not in name}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(older)}\n")
    assert read() == ([owned, record(2)], [])


def test_a_torn_last_line_is_named_and_left_as_it_is(stored, read):
    path = stored(record(1), record(2))
    torn = path.read_bytes()[:-40]
    path.write_bytes(torn)
    records, (problem,) = read()
    assert records == [record(1)]
    assert str(path) in problem
    assert "unfinished last line" in problem
    assert path.read_bytes() == torn


def test_a_damaged_line_costs_only_itself(stored, read):
    path = stored(record(1), record(2), record(3))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\x00\xff" + lines[1][2:]
    path.write_bytes(b"".join(lines))
    records, (problem,) = read()
    assert records == [record(1), record(3)]
    assert f"byte {len(lines[0])}" in problem


@pytest.mark.parametrize(
    "line", [b"[]", b"1", b'"x"', b"{}", b"[" * 100_000, b'{"schema": "1"}', b'{"a": NaN}']
)
def test_lines_that_are_no_records_are_skipped(stored, read, line):
    path = stored(record(1))
    path.write_bytes(line + b"\n" + path.read_bytes())
    records, problems = read()
    assert records == [record(1)]
    assert len(problems) == 1


def test_a_newer_schema_is_refused_by_name(stored, read):
    path = stored(record(1))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "schema": 99}) + "\n")
    records, (problem,) = read()
    assert records == []
    assert "schema 99 is newer than 2" in problem


def test_the_rest_of_a_line_that_is_written_while_it_is_read_is_no_line(stored, monkeypatch):
    path = stored(record(1), record(2))
    whole = path.read_bytes()

    class Growing(io.BytesIO):
        """A file of which half a line is there at first, and the rest at the next look."""

        def readline(self, _most):
            return next(pieces, b"")

    first, second = whole.splitlines(keepends=True)
    pieces = iter([first, second[:50], second[50:]])
    with monkeypatch.context() as patch:
        patch.setattr(store, "open_regular", lambda _path: Growing(whole))
        assert list(read_lines(path)) == [(0, first)]
    assert list(read_lines(path, start=len(first))) == [(len(first), second)]


@pytest.mark.parametrize("there", ["pipe", "/dev/zero"])
def test_a_pipe_or_device_in_the_place_of_a_file_of_lines_is_not_waited_for(tmp_path, there):
    path = tmp_path / "lines.jsonl"
    os.mkfifo(path) if there == "pipe" else path.symlink_to(there)
    with pytest.raises(StoreError, match="cannot be read: it is no regular file"):
        list(read_lines(path))


def test_a_session_that_goes_on_after_a_torn_line_keeps_its_own_line_whole(stored, read):
    path = stored(record(1))
    path.write_bytes(path.read_bytes()[:-40])
    stored(record(2))
    assert read()[0] == [record(2)]


def test_a_session_id_that_leaves_the_directory_is_refused(state_dir):
    with pytest.raises(StoreError, match="cannot be a file name"):
        Store(state_dir, "../evil")


def test_a_figure_that_is_no_number_is_not_stored(stored, read):
    with pytest.raises(StoreError, match="cannot be stored as JSON"):
        stored(dataclasses.replace(record(1), node_hours=float("nan")))
    assert read() == ([], [])


def test_a_directory_that_cannot_be_made_is_named(state_dir, stored):
    state_dir.write_text("a file")
    with pytest.raises(StoreError, match="state"):
        stored(record(1))


def test_a_group_writable_state_directory_makes_group_writable_files(state_dir, stored):
    state_dir.mkdir()
    state_dir.chmod(0o2770)
    path = stored(record(1))
    assert path.stat().st_mode & 0o777 == 0o664
    assert path.parent.stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_is_named_and_leaves_whole_lines_only(state_dir, stored, read):
    with small_disk(state_dir / "records", mounted=True) as disk, disk.full(left=8192):
        with pytest.raises(StoreError, match=rf"s1\.jsonl.* cannot be stored: {disk.words}"):
            stored(*map(record, range(100)))
        records, problems = read()
    assert records == [record(number) for number in range(len(records))] != []
    assert problems == []


WRITER = """
import sys
from pathlib import Path
from worlds import record
from pytest_mlhpc.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
for number in range(int(sys.argv[3])):
    store.append(record(number))
    print(number, flush=True)
"""


def writer(state_dir: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", WRITER, str(state_dir), name, str(count)]
    return subprocess.Popen(argv, cwd=TESTS, stdout=subprocess.PIPE)


def test_two_writers_lose_nothing(state_dir, read):
    for one in [writer(state_dir, name, 50) for name in ("a", "b")]:
        one.communicate()
        assert one.returncode == 0
    assert len(read()[0]) == 100


def test_what_was_stored_before_a_kill_is_there_after_it(state_dir, read):
    with writer(state_dir, "a", 100_000) as one:
        for _ in range(20):
            one.stdout.readline()
        one.kill()
        count = 20 + len(one.stdout.read().split())
    assert len(read()[0]) >= count


MEMORY = """
import os, resource, sys
from pathlib import Path
from worlds import rank, record, measurement
from pytest_mlhpc.node.protocol.schema import SchemaError, to_json
from pytest_mlhpc.store.store import Store, parse_record, read_lines, read_records
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = Path(sys.argv[1])
store = Store(state, "s1")
big = record(1, measurement=measurement(step_times_s=(0.1234,) * 300, per_rank=(rank(),)))
os.fsync = lambda descriptor: None
for _ in range(1000):
    store.append(big)
before = peak()
print(sum(1 for _ in read_records(state)), peak() - before)
"""


def test_a_thousand_records_are_read_in_little_memory(state_dir):
    count, grown_kib = map(int, run(MEMORY, state_dir).split())
    assert count == 1000
    assert grown_kib < 10_000


@given(changed(json.loads(json.dumps(to_json(record(1))))))
def test_any_value_in_any_place_of_a_record_is_read_or_refused_with_a_message(content):
    try:
        found = parse_record(json.dumps(content).encode())
    except SchemaError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert parse_record(json.dumps(to_json(found)).encode()) == found


def test_records_of_a_drill_are_read_in_its_own_state_directory_and_refused_in_any_other(state_dir, tmp_path):
    marked = replace(record(1), drill="d1 slow-steps=10%")
    for folder in (state_dir, tmp_path / "drill", tmp_path / "other"):
        with closing(Store(folder, "s1")) as store:
            store.append(marked)
    (tmp_path / "drill" / DRILL).write_text('{"id": "d1"}')
    (tmp_path / "other" / DRILL).write_text('{"id": "d2"}')
    told = []
    found = {
        folder.name: list(read_records(folder, told.append))
        for folder in (state_dir, tmp_path / "drill", tmp_path / "other")
    }
    assert [name for name, records in found.items() if records] == ["drill"]
    assert [
        "a record of the drill d1, whose faults were planted: no other history takes it" in one
        for one in told
    ] == [True] * 2


def test_the_index_takes_no_record_of_a_drill_into_a_real_history(state_dir):
    with closing(Store(state_dir, "s1")) as store:
        store.append(replace(record(1), drill="d1"))
        store.append(record(2))
    told = []
    with closing(LocalSource(state_dir, told.append)) as source:
        assert [night.id for night in source.nights()] == [record(2).id]
    assert len(told) == 1


def test_a_damaged_mark_of_a_drill_is_no_ordinary_state_directory(state_dir):
    state_dir.mkdir()
    (state_dir / DRILL).write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        drill_of(state_dir)
