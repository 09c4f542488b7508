"""The record store: what survives torn lines, kills, full disks and several writers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import record

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.results.store import Store, read_records

TESTS = Path(__file__).resolve().parents[1]


def store_of(state_dir: Path, *records: object, session: str = "s1") -> Path:
    store = Store(state_dir, session)
    for one in records:
        store.append(one)  # type: ignore[arg-type]  # made-up records
    store.close()
    assert store.path is not None
    return store.path


def test_a_record_comes_back_as_it_was_stored(state_dir: Path) -> None:
    path = store_of(state_dir, record(1), record(2))
    assert list(read_records(state_dir)) == [record(1), record(2)]
    assert path.parent.parent == state_dir / "records"


def test_a_torn_last_line_is_named_and_left_as_it_is(state_dir: Path) -> None:
    path = store_of(state_dir, record(1), record(2))
    torn = path.read_bytes()[:-40]
    path.write_bytes(torn)
    problems: list[str] = []
    assert list(read_records(state_dir, problems.append)) == [record(1)]
    assert len(problems) == 1
    assert str(path) in problems[0]
    assert "unfinished last line" in problems[0]
    assert path.read_bytes() == torn


def test_a_damaged_line_costs_only_itself(state_dir: Path) -> None:
    path = store_of(state_dir, record(1), record(2), record(3))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\x00\xff" + lines[1][2:]
    path.write_bytes(b"".join(lines))
    problems: list[str] = []
    assert list(read_records(state_dir, problems.append)) == [record(1), record(3)]
    assert f"byte {len(lines[0])}" in problems[0]


@pytest.mark.parametrize(
    "line", [b"[]", b"1", b'"x"', b"{}", b"[" * 100_000, b'{"schema": "1"}', b'{"a": NaN}']
)
def test_lines_that_are_no_records_are_skipped(state_dir: Path, line: bytes) -> None:
    path = store_of(state_dir, record(1))
    path.write_bytes(line + b"\n" + path.read_bytes())
    problems: list[str] = []
    assert list(read_records(state_dir, problems.append)) == [record(1)]
    assert len(problems) == 1


def test_a_newer_schema_is_refused_by_name(state_dir: Path) -> None:
    path = store_of(state_dir, record(1))
    data = json.loads(path.read_bytes())
    data["schema"] = 99
    path.write_text(json.dumps(data) + "\n")
    problems: list[str] = []
    assert list(read_records(state_dir, problems.append)) == []
    assert "schema 99 is newer than 1" in problems[0]


def test_a_session_that_goes_on_after_a_torn_line_keeps_its_own_line_whole(state_dir: Path) -> None:
    path = store_of(state_dir, record(1))
    path.write_bytes(path.read_bytes()[:-40])
    store_of(state_dir, record(2))
    assert list(read_records(state_dir)) == [record(2)]


def test_a_session_id_that_leaves_the_directory_is_refused(state_dir: Path) -> None:
    with pytest.raises(StoreError, match="cannot be a file name"):
        Store(state_dir, "../evil")


def test_a_figure_that_is_no_number_is_not_stored(state_dir: Path) -> None:
    with pytest.raises(StoreError, match="cannot be stored as JSON"):
        Store(state_dir, "s1").append(dataclasses.replace(record(1), node_hours=float("nan")))
    assert list(read_records(state_dir)) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StoreError, match="state"):
        Store(tmp_path / "state", "s1").append(record(1))


def test_a_group_writable_state_directory_makes_group_writable_files(state_dir: Path) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o2770)
    path = store_of(state_dir, record(1))
    assert path.stat().st_mode & 0o777 == 0o664
    assert path.parent.stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_is_named_and_leaves_whole_lines_only(state_dir: Path) -> None:
    code = f"""
import resource, signal, sys
from pathlib import Path
from worlds import record
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.results.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
store = Store(Path({str(state_dir)!r}), "s1")
try:
    for number in range(100):
        store.append(record(number))
except StoreError as error:
    print(number, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # what measures coverage writes a file at exit
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    stored, _, message = done.stdout.partition(" ")
    assert "s1.jsonl" in message
    assert "cannot be stored: File too large" in message
    problems: list[str] = []
    assert len(list(read_records(state_dir, problems.append))) == int(stored) > 1
    assert problems == []


WRITER = """
import sys
from pathlib import Path
from worlds import record
from pytest_mlhpc.results.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
for number in range(int(sys.argv[3])):
    store.append(record(number))
    print(number, flush=True)
"""


def test_two_writers_lose_nothing(state_dir: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(state_dir), name, "50"], cwd=TESTS, stdout=subprocess.PIPE
        )
        for name in ("a", "b")
    ]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(list(read_records(state_dir))) == 100


def test_what_was_stored_before_a_kill_is_there_after_it(state_dir: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(state_dir), "a", "100000"], cwd=TESTS, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    os.kill(writer.pid, 9)
    told = 20 + len(writer.stdout.read().split())
    writer.wait()
    writer.stdout.close()
    assert len(list(read_records(state_dir))) >= told


def test_two_thousand_records_are_read_in_little_memory(state_dir: Path) -> None:
    code = f"""
import resource
from pathlib import Path
from worlds import rank, record, measurement
from pytest_mlhpc.results.store import Store, read_records
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = Path({str(state_dir)!r})
store = Store(state, "s1")
big = record(1, measurement=measurement(step_times_s=(0.1234,) * 300, per_rank=(rank(),)))
import os; os.fsync = lambda descriptor: None
for _ in range(2000):
    store.append(big)
before = peak()
print(sum(1 for _ in read_records(state)), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count == 2000
    assert grown_kib < 20_000
