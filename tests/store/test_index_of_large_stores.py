"""The index of years of records: a question takes in what it needs, and answers as if all were taken in."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nights_of import store
from worlds import DEFINITION, record

from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import index_path
from pytest_mlhpc.store.record import Epoch, Record, SeriesKey
from pytest_mlhpc.store.store import (
    FOREVER_NS,
    benchmarks_in,
    json_line,
    newest_possible,
    read_records,
)

KEY = SeriesKey("cirrus", "standard", "default", "", "suites/test_a.py::test_a", "rate")
EPOCH = Epoch(DEFINITION, "EPYC")
DAY_NS = 86_400 * 10**9
#: The first night, 2027-01-15, and how many there are, one a session, 11 days apart.
BEGINNING_NS, NIGHTS = 1_800_000_000 * 10**9, 60
TESTS = Path(__file__).resolve().parents[1]


def night_record(night: int, test: int = 0, **changes: Any) -> Record:
    """Return a record of a night, whose ids tell their times as real ones do."""
    created_ns = BEGINNING_NS + night * 11 * DAY_NS + test * 10**9
    begins = f"{created_ns // 10**6:012x}"
    fields: dict[str, Any] = {
        "id": f"{begins[:8]}-{begins[8:]}-7000-8000-{night * 100 + test:012d}", "session": f"night-{night:03}", "created_ns": created_ns,
    }  # fmt: skip
    return replace(record(1, 100.0 + night), **{**fields, **changes})


def fill(state_dir: Path) -> None:
    """Store nights of three tests, of which the newest lack the first; results of another tool lie beside them."""
    for night in range(NIGHTS):
        tests = (0, 1, 2) if night < NIGHTS - 20 else (1, 2)
        names = [{"benchmark": KEY.benchmark if test == 0 else f"test_{test}"} for test in tests]
        records = [night_record(night, test, **name) for test, name in zip(tests, names, strict=True)]
        store(state_dir, records, f"night-{night:03}")
    order = random.Random(1).sample(range(20), 20)  # noqa: S311 - test data, the same each time
    foreign = [night_record(30, 50 + place, session="foreign", benchmark="foreign") for place in order]
    store(state_dir, foreign, "foreign")


@contextmanager
def opened(state_dir: Path, **options: Any) -> Iterator[Index]:
    with closing(Index(state_dir, **{"patience_s": 0, **options})) as index:
        yield index


def files_taken_in(state_dir: Path) -> int:
    with closing(sqlite3.connect(index_path(state_dir))) as database:
        (number,) = database.execute("SELECT count(*) FROM files").fetchone()
    return int(number)


def nights_since(index: Index, since_ns: int) -> list[str]:
    source = LocalSource(Path("unused"), index=index)
    series = [
        f"{one.key.benchmark} {point.night.id} {point.value}"
        for one in source.series(since_ns)
        for point in one.points
    ]
    return [night.id for night in source.nights(since_ns)] + series


def series_of(index: Index, benchmark: str) -> list[Any]:
    found = LocalSource(Path("unused"), index=index).series(BEGINNING_NS, benchmark=benchmark)
    return [(one.key, [(point.night.id, point.value) for point in one.points]) for one in found]


def ids(records: Any) -> list[str]:
    return [one.id for one in records]


QUESTIONS: dict[str, Callable[[Index], Any]] = {
    "the newest": lambda index: ids(index.newest(limit=5)),
    "more than a year": lambda index: ids(index.newest(limit=150)),
    "a test that is no more": lambda index: ids(index.newest(test=KEY.benchmark, limit=3)),
    "an old session": lambda index: ids(index.newest(session="night-003", limit=10)),
    "a session that is none": lambda index: ids(index.newest(session="night-999")),
    "one id": lambda index: ids(index.find(night_record(7, 1).id)),
    "the beginning of an id": lambda index: ids(index.find(night_record(7, 1).id[:9])),
    "an id that is there": lambda index: index.has(night_record(9).id),
    "an id that is not": lambda index: index.has(night_record(9, 90).id),
    "the last month": lambda index: ids(index.since(BEGINNING_NS + (NIGHTS * 11 - 31) * DAY_NS)),
    "its nights": lambda index: nights_since(index, BEGINNING_NS + (NIGHTS * 11 - 31) * DAY_NS),
    "half of all": lambda index: nights_since(index, BEGINNING_NS + 30 * 11 * DAY_NS),
    "a tool's results": lambda index: nights_since(index, BEGINNING_NS + 30 * 11 * DAY_NS + 60 * 10**9),
    "all of it": lambda index: nights_since(index, 0),
    "history": lambda index: index.history(KEY, EPOCH, since_ns=BEGINNING_NS + 20 * 11 * DAY_NS),
    "an old epoch": lambda index: index.newest_epoch(KEY),
    "an epoch that never was": lambda index: index.newest_epoch(replace(KEY, benchmark="none")),
    "the last good": lambda index: index.last_good(KEY, EPOCH),
    "the newest of a series": lambda index: index.newest_of(KEY),
    "one test's series": lambda index: series_of(index, KEY.benchmark),
    "series of a test that never was": lambda index: series_of(index, "none"),
    "all tests": lambda index: index.benchmarks(),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an index that holds everything answers."""
    state_dir = tmp_path_factory.mktemp("whole")
    fill(state_dir)
    with opened(state_dir) as index:
        assert index.rebuild() == len(list(read_records(state_dir)))
        return {name: question(index) for name, question in QUESTIONS.items()}


@pytest.fixture
def years(state_dir: Path) -> Path:
    fill(state_dir)
    return state_dir


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_first_question_is_answered_as_if_all_were_taken_in(
    years: Path, answers: dict[str, Any], name: str
) -> None:
    with opened(years) as index:
        assert QUESTIONS[name](index) == answers[name]


@pytest.mark.parametrize("patience_s", [0.0, 3600.0])
def test_questions_in_any_order_are_answered_as_if_all_were_taken_in(
    years: Path, answers: dict[str, Any], patience_s: float
) -> None:
    order = [*QUESTIONS]
    for seed in range(3):
        random.Random(seed).shuffle(order)  # noqa: S311 - test data, the same each time
        index_path(years).unlink(missing_ok=True)
        with opened(years, patience_s=patience_s) as index:
            for name in order:
                assert QUESTIONS[name](index) == answers[name], (seed, name)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("the newest", 5),
        ("an old session", 2),
        ("an id that is not", 54),
        ("the last month", 7),
        ("one test's series", 40),
        ("series of a test that never was", 0),
        ("an epoch that never was", 0),
    ],
)
def test_a_question_takes_in_few_old_files(years: Path, name: str, most: int) -> None:
    with opened(years) as index:
        QUESTIONS[name](index)
    assert files_taken_in(years) <= most


@pytest.mark.parametrize(
    "name",
    [
        "test_a",
        'test_a["quoted",x="\\"]',
        "tést_\u20ac",
        "test_\ud800",
        '"benchmark":"other"',
        "",
        "x" * 100_000,
    ],
)
def test_the_benchmarks_of_a_file_are_read_off_its_lines(state_dir: Path, name: str) -> None:
    records = [
        night_record(0, 0, benchmark=name, node_id=f'{name}"benchmark":"not_this"'),
        night_record(0, 1, benchmark="test_b", parameters={"benchmark": "nor_this"}),
    ]
    assert benchmarks_in(store(state_dir, records, "night-000")) == sorted([name, "test_b"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-1],
        lambda line: line.replace(b'"benchmark":', b'"benchmark": '),
        lambda line: line.replace(b'"benchmark":"', b'"benchmark":"\\x'),
        lambda line: b"\xff\n",
        lambda line: b"{}\n",
    ],
    ids=["torn", "written by another program", "no JSON", "no text", "no benchmark"],
)
def test_a_file_with_a_line_that_plainly_names_no_benchmark_may_hold_any(
    state_dir: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = store(state_dir, [night_record(0)], "night-000")
    path.write_bytes(path.read_bytes() + damage(json_line_of(night_record(1, session="night-000"))))
    assert benchmarks_in(path) is None
    assert benchmarks_in(path.with_name("missing")) is None


def test_a_test_that_a_waiting_file_begins_to_name_is_found_in_it(years: Path) -> None:
    with opened(years) as index:
        assert series_of(index, "late") == []
        path = years / "records" / "2027-02" / "night-003.jsonl"
        late = night_record(3, 90, benchmark="late", session="night-003")
        with path.open("ab") as file:
            file.write(json_line_of(late))
        ((_, points),) = series_of(index, "late")
        assert [one for one, _ in points] == [late.id]


def test_a_file_that_grew_while_it_waited_is_looked_at_again(years: Path) -> None:
    with opened(years) as index:
        index.newest(limit=1)
        before = files_taken_in(years)
        late = night_record(NIGHTS + 1, session="night-003")
        path = years / "records" / "2027-02" / "night-003.jsonl"
        with path.open("ab") as file:
            file.write(json_line_of(late))
        assert ids(index.newest(limit=1)) == [late.id]
    assert files_taken_in(years) == before + 1


def test_a_file_that_went_while_it_waited_is_forgotten(years: Path) -> None:
    with opened(years) as index:
        index.newest(limit=1)
        (years / "records" / "2027-02" / "night-003.jsonl").unlink()
        assert index.newest(session="night-003") == []
    with closing(sqlite3.connect(index_path(years))) as database:
        assert database.execute("SELECT * FROM waiting WHERE path LIKE '%night-003%'").fetchall() == []


def json_line_of(one: Record) -> bytes:
    return json_line(to_json(one))


def test_time_until_which_a_file_holds_records_is_read_off_its_end(state_dir: Path) -> None:
    path = store(state_dir, [night_record(0), night_record(9, session="night-000")], "night-000")
    assert newest_possible(path) == night_record(9).created_ns
    path = store(state_dir, [night_record(1)], "night-001")
    assert night_record(1).created_ns < newest_possible(path) <= night_record(1).created_ns + 31 * DAY_NS


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\n" * 9),
        lambda path: path.write_bytes(path.read_bytes() + json_line_of(night_record(2, session="other"))),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"created_ns"', b'"made_ns"')),
        lambda path: path.write_bytes(path.read_bytes().replace(b":18", b":99999999918")),
        lambda path: path.rename(path.with_name("other.jsonl")),
    ],
)
def test_a_file_that_is_not_as_sessions_write_them_may_hold_anything(
    state_dir: Path, damage: Callable[[Path], Any]
) -> None:
    path = store(state_dir, [night_record(0)], "night-000")
    damage(path)
    (found,) = path.parent.glob("*.jsonl")
    assert newest_possible(found) == FOREVER_NS


@pytest.mark.parametrize("month", ["2027-13", "9999-12", "0001-01", "archive", "2027-1"])
def test_a_file_in_a_folder_that_is_no_month_may_hold_anything(state_dir: Path, month: str) -> None:
    path = store(state_dir, [night_record(0)], "night-000")
    moved = path.parent.with_name(month) / path.name
    moved.parent.mkdir()
    path.rename(moved)
    assert newest_possible(moved) == FOREVER_NS
    with opened(state_dir) as index:
        assert ids(index.newest(limit=1)) == [night_record(0).id]


def test_a_line_much_longer_than_the_end_that_is_read_first_tells_its_time(state_dir: Path) -> None:
    long = night_record(3, session="night-000", explanation=("x" * 100_000,))
    path = store(state_dir, [night_record(0), long], "night-000")
    assert newest_possible(path) >= long.created_ns
    assert newest_possible(path) < FOREVER_NS


@pytest.mark.parametrize(
    "odd", ["1e999", "true", '"1"', "null", "[1]"], ids=["infinite", "true", "a text", "nothing", "a list"]
)
def test_a_record_with_an_odd_figure_is_left_out_and_told(state_dir: Path, odd: str) -> None:
    path = store(state_dir, [night_record(0), night_record(1, session="night-000")], "night-000")
    first, second = path.read_bytes().splitlines(keepends=True)
    assert b'"value":100.0' in first
    path.write_bytes(first.replace(b'"value":100.0', f'"value":{odd}'.encode()) + second)
    problems: list[str] = []
    with closing(Index(state_dir, problems.append)) as index:
        assert index.history(KEY, EPOCH) == [101.0]
    assert len(problems) == 1
    assert str(path) in problems[0]


def test_a_whole_number_is_a_figure(state_dir: Path) -> None:
    path = store(state_dir, [night_record(0)], "night-000")
    path.write_bytes(path.read_bytes().replace(b'"value":100.0', b'"value":100'))
    with opened(state_dir) as index:
        assert index.history(KEY, EPOCH) == [100.0]


#: Takes in small portions and dies by SIGKILL in the middle of the file of that number.
KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_mlhpc.store import index
index._TOGETHER = 5000
left, whole = int(sys.argv[2]), index.Index._take_in_line
def take_in_line(self, *arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, *arguments)
index.Index._take_in_line = take_in_line
index.Index(Path(sys.argv[1])).benchmarks()
"""


@pytest.mark.parametrize("lines", [1, 2, 50, 120])
def test_after_a_kill_in_the_middle_all_is_answered(years: Path, answers: dict[str, Any], lines: int) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(years), str(lines)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with opened(years) as index:
        assert {name: question(index) for name, question in QUESTIONS.items()} == answers


ASKED = """
import sys
from pathlib import Path
from test_index_of_large_stores import QUESTIONS, opened
with opened(Path(sys.argv[1])) as index:
    for name in sys.argv[2:]:
        print(name, QUESTIONS[name](index))
"""


def test_two_processes_that_take_in_at_once_both_answer(years: Path, answers: dict[str, Any]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'store'}"}
    argv = [sys.executable, "-c", ASKED, str(years)]
    orders = [*QUESTIONS], [*reversed(QUESTIONS)]
    running = [
        subprocess.Popen([*argv, *order], env=environment, stdout=subprocess.PIPE, text=True)
        for order in orders
    ]
    for order, process in zip(orders, running, strict=True):
        output, _ = process.communicate()
        assert output == "".join(f"{name} {answers[name]}\n" for name in order)
    with opened(years) as index:
        assert {name: question(index) for name, question in QUESTIONS.items()} == answers


@pytest.mark.parametrize(
    "tables",
    [
        "CREATE TABLE files (x)",
        "CREATE TABLE waiting (path)",
        "CREATE TABLE records (id INTEGER PRIMARY KEY)",
    ],
)
def test_an_index_with_other_tables_under_our_name_is_not_used(
    years: Path, answers: dict[str, Any], tables: str
) -> None:
    with closing(sqlite3.connect(index_path(years))) as database, database:
        database.execute(tables)
    with opened(years) as index:
        assert {name: question(index) for name, question in QUESTIONS.items()} == answers


def test_an_index_that_is_damaged_in_its_middle_is_made_anew(years: Path, answers: dict[str, Any]) -> None:
    with opened(years) as index:
        index.benchmarks()
    content = bytearray(index_path(years).read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 512] = b"\xff" * 512
    index_path(years).write_bytes(content)
    with opened(years) as index:
        assert {name: question(index) for name, question in QUESTIONS.items()} == answers


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not write")
def test_who_may_only_read_the_state_directory_gets_the_same_answers(
    answers: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    # Not below pytest's own folder, which each session of pytest closes to others.
    with tempfile.TemporaryDirectory() as folder:
        years = Path(folder) / "state"
        fill(years)
        Path(folder).chmod(0o755)
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                with opened(years) as index:
                    found = {name: question(index) for name, question in QUESTIONS.items()}
                os.write(1, b"the same" if found == answers else b"others")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert capfd.readouterr().out == "the same"
        assert [path.name for path in years.iterdir()] == ["records"]
