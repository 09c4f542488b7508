"""The command `mlhpc`: what people type, what they get, and how it ends."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from nights_of import store
from worlds import measurement, record

from pytest_mlhpc.cli import COMMANDS, main
from pytest_mlhpc.results.last_text import lines_of
from pytest_mlhpc.results.record import Record

NODE = "suites/test_a.py::test_a[cirrus:standard]"


def fill(state_dir: Path, *records: Record) -> None:
    store(state_dir, records)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The folder in which the command is typed."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def mlhpc(capfd):
    """Return how to run the command for what it prints: an error goes to standard error alone."""

    def run(*words: str, code: int = 0) -> str:
        try:
            ended = main(words)
        except SystemExit as exit_:
            ended = exit_.code
        out, err = capfd.readouterr()
        assert ended == code, out + err
        assert "Traceback" not in out + err
        if code in {3, 4}:
            assert out == ""
        return out or err

    return run


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from pytest_mlhpc.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'pytest', 'pydantic', 'yaml', 'rich', 'sqlite3'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("baselin", "did you mean 'baseline'?"),
        ("x" * 50, "there is no command"),
        ("--nonsense", "unrecognized arguments"),
        ("baseline", "required"),
        ("baseline accept NODE", "--reason"),
        ("baseline accept NODE --reason ' '", "must say why"),
        ("baseline accept NODE --reason TEXT", "must say why"),
        ("baseline accept NODE --reason new-compiler", "nothing was recorded for"),
        ("baseline show archer", "has no accepted values"),
        ("baseline show ../x", "cannot be a file name"),
        ("records show 0189", "no record's id starts with '0189'"),
    ],
)
def test_a_usage_error_exits_with_4_and_one_clear_message(mlhpc, words, message):
    assert message in mlhpc(*shlex.split(words.replace("NODE", NODE)), code=4)


def test_a_damaged_baseline_file_is_named_with_its_line(mlhpc, project):
    (project / "baselines").mkdir()
    (project / "baselines" / "cirrus.yaml").write_text("schema: 1\nsystem: cirrus\nseries: 5\n")
    assert "baselines/cirrus.yaml:3: series: must be a list" in mlhpc("baseline", "show", "cirrus", code=4)


def test_a_file_that_cannot_be_written_is_named(mlhpc, state_dir, project):
    fill(state_dir, record(1))
    (project / "baselines").write_text("in the way")
    assert "baselines" in mlhpc("baseline", "accept", NODE, "--reason", "new compiler", code=3)


def test_a_closed_pipe_ends_quietly(state_dir):
    fill(state_dir, *(record(number) for number in range(300)))
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "records", "list", "--limit", "300", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


def test_accepting_the_last_run_takes_the_median_of_its_attempts(mlhpc, state_dir, project):
    runs = [
        record(1 + n, measurement=measurement(value, attempt=n), attempt=n, verdict="regressed")
        for n, value in enumerate((80.0, 82.0, 90.0))
    ]
    fill(state_dir, *runs)
    printed = mlhpc("baseline", "accept", NODE, "--reason", "slower but right")
    assert "rate: 82 samples/s (median of 3 runs)" in printed
    assert "written: baselines/cirrus.yaml" in printed
    text = (project / "baselines" / "cirrus.yaml").read_text()
    assert "value: 82.0" in text
    assert 'reason: "slower but right"' in text
    assert "82 samples/s" in mlhpc("baseline", "show")


def test_a_record_is_accepted_by_the_start_of_its_id(mlhpc, state_dir):
    fill(state_dir, record(1, 70.0), record(2, 80.0))
    assert "rate: 70 samples/s (one run)" in mlhpc(
        "baseline", "accept", record(1).id, "--reason", "the quiet one"
    )


def test_a_broken_run_is_not_accepted(mlhpc, state_dir, project):
    fill(state_dir, record(1, verdict="too_few_steps"))
    message = mlhpc("baseline", "accept", NODE, "--reason", "why not", code=4)
    assert "its last run ended as too_few_steps" in message
    assert not (project / "baselines").exists()


def test_diff_shows_what_changed_since(mlhpc, state_dir):
    fill(state_dir, record(1, 100.0))
    mlhpc("baseline", "accept", NODE, "--reason", "first")
    fill(state_dir, record(2, 90.0, verdict="regressed"))
    assert "-10.0% (worse)" in mlhpc("baseline", "diff", "cirrus")
    assert json.loads(mlhpc("baseline", "diff", "--json"))["newest"] == 90.0


def test_prune_shows_first_and_removes_only_when_asked(mlhpc, state_dir, project):
    fill(
        state_dir,
        record(1, created_ns=1, benchmark="old", node_id="old"),
        record(2, created_ns=4_000_000_000 * 10**9),
    )
    mlhpc("baseline", "accept", NODE, "old", "--reason", "first")
    path = project / "baselines" / "cirrus.yaml"
    before = path.read_text()
    assert "would remove: old rate" in mlhpc("baseline", "prune", "cirrus")
    assert path.read_text() == before
    mlhpc("baseline", "prune", "cirrus", "--yes")
    assert "benchmark: old" not in path.read_text()
    assert "resnet50[name=test_a,ranks=1]" in path.read_text()


def test_records_are_listed_shown_and_checked(mlhpc, state_dir):
    fill(state_dir, record(1))
    (path,) = state_dir.glob("records/*/*.jsonl")
    assert "rate 100 samples/s" in mlhpc("records", "list")
    assert json.loads(mlhpc("records", "show", record(1).id, "--json"))["benchmark"] == record(1).benchmark
    assert "1 records" in mlhpc("records", "index")
    mlhpc("records", "check")
    with path.open("ab") as file:
        file.write(b"torn")
    assert f"{path}: byte" in mlhpc("records", "check", code=1)


def test_text_that_a_terminal_would_obey_is_not_printed(mlhpc, state_dir):
    fill(state_dir, record(1, node_id="evil\x1b[2Jname\nnext", verdict="worker_exit", failure="\x1b]0;x\x07"))
    for words in (["records", "list"], ["last"]):
        assert "\x1b" not in mlhpc(*words)


@pytest.mark.parametrize("words", [["history", "m\udce9"], ["records", "show", "m\udce9"]])
def test_words_that_are_no_utf8_are_answered(state_dir, words):
    done = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", *words], capture_output=True, check=False
    )
    assert done.returncode == 4
    assert b"Traceback" not in done.stderr
    assert rb"'m\udce9'" in done.stderr


def test_last_of_nothing_says_how_to_begin(mlhpc):
    assert "pytest suites/ --system local" in mlhpc("last", code=5)


def test_last_is_ten_lines_at_most_with_a_command_for_each_problem(mlhpc, state_dir):
    manual = {"purpose": "manual"}
    slow = {"session": "s1", "verdict": "regressed", "node_id": "t.py::slow", **manual}
    fill(
        state_dir,
        record(1, session="s0", **manual),
        record(2, session="s1", **manual),
        record(3, session="s1", verdict="improved", node_id="t.py::better", **manual),
        *(
            record(4 + n, session="s1", verdict="worker_exit", node_id=f"t.py::broken[{n}]", **manual)
            for n in range(5)
        ),
        record(9, explanation=("rate: 15% worse",), preset="large", **slow),
        record(10, attempt=1, **slow),
    )
    lines = mlhpc("last").splitlines()
    assert len(lines) == 10
    assert "session s1: 1 passed, 1 improved, 5 worker_exit, 1 regressed" in lines[0]
    assert lines[1] == "regressed: t.py::slow: rate: 15% worse"
    assert (
        lines[2] == "  next: pytest t.py::slow --system cirrus:standard --environment default --preset large"
    )
    assert lines[9] == "and 3 more: mlhpc records list --session s1 --limit 1000"


def test_last_names_the_state_folder_in_each_command_where_it_was_given():
    records = [record(n, verdict=v) for n, v in enumerate(["regressed", "improved", *["worker_exit"] * 3])]
    commands = [
        line for line in lines_of(records, ("--state-dir=/a b",)) if "pytest " in line or "mlhpc " in line
    ]
    assert len(commands) == 5
    assert all(line.endswith(" '--state-dir=/a b'") for line in commands)


def test_last_of_a_good_session_is_one_line():
    assert len(lines_of([record(1), record(2, verdict="new")])) == 1
    assert lines_of([record(1, verdict="no_baseline")])[2].startswith("  next: mlhpc baseline accept")


LEARNT = """
import os, pathlib, time
from worlds import record
from pytest_mlhpc.results.store import Store
def test_it():
    store = Store(pathlib.Path(os.environ["MLHPC_STATE"]), f"s{time.time_ns()}")
    number = len(list(pathlib.Path(os.environ["MLHPC_STATE"]).glob("records/*/*.jsonl")))
    store.append(record(number, 100.0 + number, created_ns=time.time_ns()))
    store.close()
"""


def test_learning_runs_the_tests_and_accepts_the_medians(mlhpc, project, monkeypatch):
    (project / "test_learnt.py").write_text(LEARNT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    words = ("baseline", "learn", "--runs", "3", "--reason", "new", "--", "-q", "test_learnt.py")
    assert "rate: 101 samples/s (median of 3 runs)" in mlhpc(*words)
    text = (project / "baselines" / "cirrus.yaml").read_text()
    assert "runs: 3" in text
    assert "spread: 0.014" in text


def test_learning_from_a_session_that_cannot_start_accepts_nothing(project, capfd):
    assert main(["baseline", "learn", "--reason", "new", "--", "absent.py"]) == 4
    assert "pytest ended with exit code 4; nothing is accepted" in capfd.readouterr().err
    assert not (project / "baselines").exists()
