"""The index: always what a scan of the record files says, whoever writes and whatever breaks."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nights_of import store
from worlds import DEFINITION, measurement, record

from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import file_system, index_path
from pytest_mlhpc.store.record import Epoch, Record, SeriesKey
from pytest_mlhpc.store.store import read_records
from pytest_mlhpc.store.text import nanoseconds

KEY = SeriesKey("cirrus", "standard", "default", "", "suites/test_a.py::test_a", "rate")
EPOCH = Epoch(DEFINITION, "EPYC")
TESTS = Path(__file__).resolve().parents[1]


def fill(state_dir: Path, *records: Record, session: str = "s1") -> Path:
    return store(state_dir, records, session)


@contextmanager
def opened(state_dir: Path, *arguments: Any, **options: Any) -> Iterator[Index]:
    """Open the index of a state directory."""
    index = Index(state_dir, *arguments, **{"patience_s": 0, **options})
    try:
        yield index
    finally:
        index.close()


def values(state_dir: Path, key: SeriesKey = KEY, **options: Any) -> list[float]:
    with opened(state_dir) as index:
        return index.history(key, EPOCH, **options)


def scanned(state_dir: Path) -> list[float]:
    """What history must return, said plainly."""
    good = (0, "passed", "nightly", "main")
    records = sorted(read_records(state_dir), key=lambda one: one.created_ns)
    found = [one for one in records if (one.attempt, one.verdict, one.purpose, one.branch) == good]
    return [one.measurement.metrics[0].value for one in found[-30:] if one.measurement]


def test_history_is_the_last_thirty_oldest_first(state_dir: Path) -> None:
    fill(state_dir, *(record(number, 100.0 + number) for number in range(40)))
    assert values(state_dir) == [100.0 + number for number in range(10, 40)]


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 1}, {"verdict": "regressed"}, {"verdict": "improved"}, {"verdict": "time_limit"},
        {"purpose": "change"}, {"purpose": "manual"}, {"branch": "topic"}, {"device_model": "other"},
        {"environment": "other"}, {"partition": "other"}, {"system": "other"}, {"benchmark": "other"},
        {"fingerprint": "machine"}, {"measurement": None}, {"definition": "resnet50 steps=20"},
    ],
)  # fmt: skip
def test_only_what_passed_at_night_on_the_default_branch_feeds_the_judge(
    state_dir: Path, changes: dict[str, Any]
) -> None:
    fill(state_dir, record(1, 7.0, **changes), record(2, 8.0))
    assert values(state_dir) == [8.0]


def test_on_local_manual_runs_feed_it_too(state_dir: Path) -> None:
    key = SeriesKey("cirrus", "standard", "default", "machine", KEY.benchmark, "rate")
    local = {"fingerprint": "machine", "purpose": "manual", "branch": "topic"}
    fill(state_dir, record(1, 7.0, **local), record(2, 8.0, **{**local, "purpose": "change"}))
    assert values(state_dir, key) == [7.0]


def test_records_before_the_baselines_date_belong_to_an_earlier_epoch(state_dir: Path) -> None:
    fill(state_dir, record(1, 7.0), record(100_000, 8.0))
    assert values(state_dir, since_ns=nanoseconds("2027-01-15T20:00:00Z")) == [8.0]
    assert nanoseconds("2027-01-15") < nanoseconds("2027-01-15T20:00:00Z")


def test_a_name_that_is_no_utf8_is_found_again(state_dir: Path) -> None:
    odd = "suites/t\udce9st.py::test_a"
    key = replace(KEY, benchmark=odd)
    fill(state_dir, record(1, 7.0, benchmark=odd))
    assert values(state_dir, key) == [7.0]


@pytest.mark.parametrize("date", ["0001-01-01", "9999-01-01"])
def test_a_date_that_64_bits_do_not_hold_is_none(date: str) -> None:
    with pytest.raises(ValueError, match="not between the years 1678 and 2262"):
        nanoseconds(date)


def test_slow_days_of_the_machine_are_corrected_when_a_reference_is_given(state_dir: Path) -> None:
    slow = record(1, measurement=measurement(80.0, calibration_before=40.0, calibration_after=40.0))
    fill(state_dir, slow)
    assert values(state_dir) == [80.0]
    assert values(state_dir, calibration_reference=50.0) == [100.0]


def test_a_rebuilt_index_equals_a_scan_and_an_incremental_one(state_dir: Path) -> None:
    choose = random.Random(4)  # noqa: S311 - test data, the same each time
    with opened(state_dir) as index:
        for number in range(60):
            verdict, branch = choose.choice(["passed", "regressed"]), choose.choice(["main", "main", "x"])
            one = record(number, 50.0 + choose.random(), verdict=verdict, branch=branch)
            fill(state_dir, one, session=f"s{number % 3}")
            if number % 6 == 5:
                assert index.history(KEY, EPOCH) == scanned(state_dir)
        assert index.rebuild() == 60
        assert index.history(KEY, EPOCH) == scanned(state_dir)


def test_a_line_that_is_torn_now_is_taken_in_once_it_is_whole(state_dir: Path) -> None:
    path = fill(state_dir, record(1, 1.0), record(2, 2.0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert values(state_dir) == [1.0]
    with path.open("ab") as file:
        file.write(whole[-10:])
    assert values(state_dir) == [1.0, 2.0]


def test_a_file_that_was_replaced_or_removed_is_forgotten(state_dir: Path) -> None:
    path = fill(state_dir, record(1, 1.0), record(2, 2.0))
    assert values(state_dir) == [1.0, 2.0]
    path.unlink()
    fill(state_dir, record(3, 3.0))
    assert values(state_dir) == [3.0]
    path.unlink()
    assert values(state_dir) == []


def test_damaged_lines_are_reported_once(state_dir: Path) -> None:
    path = fill(state_dir, record(1, 1.0))
    with path.open("ab") as file:
        file.write(b"{broken\n")
    problems: list[str] = []
    with opened(state_dir, problems.append) as index:
        assert index.history(KEY, EPOCH) == index.history(KEY, EPOCH) == [1.0]
    (problem,) = problems
    assert str(path) in problem


def test_a_damaged_index_is_made_anew(state_dir: Path) -> None:
    fill(state_dir, record(1, 1.0))
    index_path(state_dir).write_bytes(b"this is no database" * 100)
    assert values(state_dir) == [1.0]
    with closing(sqlite3.connect(index_path(state_dir))) as database:
        assert database.execute("SELECT count(*) FROM records").fetchone() == (1,)


def test_where_no_index_can_be_written_the_files_are_scanned(state_dir: Path, tmp_path: Path) -> None:
    fill(state_dir, record(1, 1.0))
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "index.sqlite", tmp_path):  # SQLite cannot open a directory
        with opened(state_dir, path=path) as index:
            assert index.history(KEY, EPOCH) == [1.0]


def test_an_index_that_another_process_holds_locked_does_not_stop_us(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(state_dir, record(1, 1.0))
    monkeypatch.setattr("pytest_mlhpc.store.index.LOCK_WAIT_S", 0.05)
    with closing(sqlite3.connect(index_path(state_dir), isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert values(state_dir) == [1.0]


WRITER = """
import sys
from pathlib import Path
from worlds import record
from test_index import EPOCH, KEY, fill, opened
state, name = Path(sys.argv[1]), sys.argv[2]
with opened(state) as index:
    for number in range(20):
        fill(state, record(2 * number + (name == 'b')), session=name)
        index.history(KEY, EPOCH)
"""


def test_several_processes_share_one_index(state_dir: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'store'}"}
    argv = [sys.executable, "-c", WRITER, str(state_dir)]
    writers = [subprocess.Popen([*argv, name], env=environment) for name in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(values(state_dir, limit=100)) == 40


def test_the_last_good_record_is_the_newest_that_passed(state_dir: Path) -> None:
    good = record(2, verdict="improved")
    fill(state_dir, record(1), good, record(3, verdict="regressed"), record(4, attempt=1))
    with opened(state_dir) as index:
        assert index.last_good(KEY, EPOCH) == good


def test_the_newest_figure_tells_its_epoch(state_dir: Path) -> None:
    other = {"definition": "resnet50 steps=20"}
    fill(state_dir, record(1), record(2, **other), record(3, measurement=None), record(4, attempt=1))
    with opened(state_dir) as index:
        assert index.newest_epoch(KEY) == Epoch("resnet50 steps=20", "EPYC")
        assert index.newest_epoch(replace(KEY, metric="loss")) is None


def test_a_record_of_an_older_schema_is_left_out_and_reported(state_dir: Path) -> None:
    fill(state_dir, record(1, 1.0, schema=1), record(2, 2.0))
    problems: list[str] = []
    with opened(state_dir, problems.append) as index:
        assert index.history(KEY, EPOCH) == [2.0]
    assert "schema 1 is older than 2, the oldest this version reads" in problems[0]


def test_records_are_found_by_session_test_and_id(state_dir: Path) -> None:
    fill(state_dir, record(1), record(2, session="other"), record(3, node_id="b", benchmark="name"))
    with opened(state_dir) as index:
        newest = index.newest(), index.newest(session="other"), index.newest(test="b")
        newest = *newest, index.newest(test="name")
        found = (*newest, index.find(record(2).id), index.find("' OR 1=1 --"))
        assert ["".join(one.id[-1] for one in records) for records in found] == [
            "321",
            "2",
            "3",
            "3",
            "2",
            "",
        ]


def test_an_index_on_a_network_file_system_goes_to_the_cache(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        f"40 22 0:40 / {tmp_path} rw shared:2 - lustre server:/work rw\n"
        "junk\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert file_system(state_dir, mounts) == "lustre"
    assert file_system(Path("/etc"), mounts) == "ext4"
    assert file_system(state_dir, tmp_path / "absent") == ""
    assert index_path(state_dir, mounts).parent == tmp_path / "cache" / "mlhpc"


def test_a_record_is_found_by_its_id_without_looking_at_all_of_them_in_older_indexes_too(
    state_dir: Path,
) -> None:
    fill(state_dir, record(1, 7.0), record(2, 8.0))
    wanted = record(1).id
    with opened(state_dir) as index:
        assert index.has(wanted)
    with closing(sqlite3.connect(index_path(state_dir))) as database, database:
        database.execute("DROP INDEX by_id")  # as an earlier version made it
    with opened(state_dir) as index:
        assert index.has(wanted)
        assert not index.has(f"{wanted}x")
        with closing(sqlite3.connect(index_path(state_dir))) as database:
            query = "SELECT 1 FROM records WHERE record_id = 'x' LIMIT 1"
            (plan,) = database.execute(f"EXPLAIN QUERY PLAN {query}")
    assert "USING COVERING INDEX by_id" in plan[-1]
