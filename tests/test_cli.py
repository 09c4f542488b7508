"""The command `mlhpc`: what people type, what they get, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import measurement, record

from pytest_mlhpc.cli import COMMANDS, main
from pytest_mlhpc.results.last_text import lines_of
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.store import Store

NODE = "suites/test_a.py::test_a[cirrus:standard]"


def fill(state_dir: Path, *records: Record, session: str = "s1") -> Path:
    store = Store(state_dir, session)
    for one in records:
        store.append(one)
    store.close()
    assert store.path is not None
    return store.path


@pytest.fixture(autouse=True)
def in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


def mlhpc(*words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_mlhpc.cli", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, **changes)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pytest_mlhpc.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'pytest', 'pydantic', 'yaml', 'rich', 'sqlite3'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["baselin"], "did you mean 'baseline'?"),
        (["x" * 50], "there is no command"),
        (["--nonsense"], "unrecognized arguments"),
        (["baseline"], "required"),
        (["baseline", "accept", NODE], "--reason"),
        (["baseline", "accept", NODE, "--reason", " "], "must say why"),
        (["baseline", "accept", NODE, "--reason", "TEXT"], "must say why"),
        (["baseline", "accept", NODE, "--reason", "new compiler"], "nothing was recorded for"),
        (["baseline", "show", "archer"], "has no accepted values"),
        (["baseline", "show", "../x"], "cannot be a file name"),
        (["records", "show", "0189"], "no record's id starts with '0189'"),
    ],
)
def test_a_usage_error_exits_with_4_and_one_clear_message(words: list[str], said: str) -> None:
    done = mlhpc(*words)
    assert done.returncode == 4
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_damaged_baseline_file_is_named_with_its_line(in_a_project: Path) -> None:
    (in_a_project / "baselines").mkdir()
    (in_a_project / "baselines" / "cirrus.yaml").write_text("schema: 1\nsystem: cirrus\nseries: 5\n")
    done = mlhpc("baseline", "show", "cirrus")
    assert done.returncode == 4
    assert "baselines/cirrus.yaml:3: series: must be a list" in done.stderr


def test_a_file_that_cannot_be_written_exits_with_3_and_its_path(state_dir: Path, in_a_project: Path) -> None:
    fill(state_dir, record(1))
    (in_a_project / "baselines").write_text("in the way")
    done = mlhpc("baseline", "accept", NODE, "--reason", "new compiler")
    assert done.returncode in {3, 4}
    assert "baselines" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_ends_quietly(state_dir: Path) -> None:
    fill(state_dir, *(record(number) for number in range(300)))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_mlhpc.cli", "records", "list", "--limit", "300", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert errors == b""


def test_accepting_the_last_run_takes_the_median_of_its_attempts(
    state_dir: Path, in_a_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        record(
            number,
            measurement=measurement(value, attempt=number - 1),
            attempt=number - 1,
            verdict="regressed",
        )
        for number, value in ((1, 80.0), (2, 82.0), (3, 90.0))
    ]
    fill(state_dir, *runs)
    assert main(["baseline", "accept", NODE, "--reason", "slower but right"]) == 0
    told = capsys.readouterr().out
    assert "rate: 82 samples/s (median of 3 runs)" in told
    assert "written: baselines/cirrus.yaml" in told
    text = (in_a_project / "baselines" / "cirrus.yaml").read_text()
    assert "value: 82.0" in text
    assert 'reason: "slower but right"' in text
    assert main(["baseline", "show"]) == 0
    assert "82 samples/s" in capsys.readouterr().out


def test_a_record_is_accepted_by_the_start_of_its_id(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(state_dir, record(1, 70.0), record(2, 80.0))
    assert main(["baseline", "accept", record(1).id, "--reason", "the quiet one"]) == 0
    assert "rate: 70 samples/s (one run)" in capsys.readouterr().out


def test_a_broken_run_is_not_accepted(state_dir: Path, in_a_project: Path) -> None:
    fill(state_dir, record(1, verdict="too_few_steps"))
    done = mlhpc("baseline", "accept", NODE, "--reason", "why not")
    assert done.returncode == 4
    assert "its last run ended as too_few_steps" in done.stderr
    assert not (in_a_project / "baselines").exists()


def test_diff_shows_what_changed_since(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(state_dir, record(1, 100.0))
    main(["baseline", "accept", NODE, "--reason", "first"])
    fill(state_dir, record(2, 90.0, verdict="regressed"))
    capsys.readouterr()
    assert main(["baseline", "diff", "cirrus"]) == 0
    assert "-10.0% (worse)" in capsys.readouterr().out
    assert main(["baseline", "diff", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["newest"] == 90.0


def test_prune_shows_first_and_removes_only_when_told(
    state_dir: Path, in_a_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(
        state_dir,
        record(1, created_ns=1, benchmark="old", node_id="old"),
        record(2, created_ns=4_000_000_000 * 10**9),
    )
    main(["baseline", "accept", NODE, "old", "--reason", "first"])
    path = in_a_project / "baselines" / "cirrus.yaml"
    before = path.read_text()
    capsys.readouterr()
    assert main(["baseline", "prune", "cirrus"]) == 0
    assert "would remove: old rate" in capsys.readouterr().out
    assert path.read_text() == before
    assert main(["baseline", "prune", "cirrus", "--yes"]) == 0
    assert "benchmark: old" not in path.read_text()
    assert "resnet50[name=test_a,ranks=1]" in path.read_text()


def test_records_are_listed_shown_and_checked(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fill(state_dir, record(1))
    assert main(["records", "list"]) == 0
    assert "rate 100 samples/s" in capsys.readouterr().out
    assert main(["records", "show", record(1).id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == record(1).benchmark
    assert main(["records", "index"]) == 0
    assert "1 records" in capsys.readouterr().out
    assert main(["records", "check"]) == 0
    with path.open("ab") as file:
        file.write(b"torn")
    assert main(["records", "check"]) == 1
    assert f"{path}: byte" in capsys.readouterr().out


def test_text_that_a_terminal_would_obey_is_not_printed(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(state_dir, record(1, node_id="evil\x1b[2Jname\nnext", verdict="worker_exit", failure="\x1b]0;x\x07"))
    main(["records", "list"])
    main(["last"])
    assert "\x1b" not in capsys.readouterr().out


def test_last_of_nothing_says_how_to_begin() -> None:
    done = mlhpc("last")
    assert done.returncode == 5
    assert "pytest suites/ --system local" in done.stdout


def test_last_is_ten_lines_at_most_with_a_command_for_each_problem(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manual = {"purpose": "manual"}
    fill(
        state_dir,
        record(1, session="s0", **manual),
        record(2, session="s1", **manual),
        record(3, session="s1", verdict="improved", node_id="t.py::better", **manual),
        *(
            record(4 + n, session="s1", verdict="worker_exit", node_id=f"t.py::broken[{n}]", **manual)
            for n in range(5)
        ),
        record(
            9,
            session="s1",
            verdict="regressed",
            node_id="t.py::slow",
            explanation=("rate: 15% worse",),
            preset="large",
            **manual,
        ),
        record(10, session="s1", attempt=1, verdict="regressed", node_id="t.py::slow", **manual),
        session="s1",
    )
    assert main(["last"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert "session s1: 1 passed, 1 improved, 5 worker_exit, 1 regressed" in lines[0]
    assert lines[1] == "regressed: t.py::slow: rate: 15% worse"
    assert (
        lines[2] == "  next: pytest t.py::slow --system cirrus:standard --environment default --preset large"
    )
    assert lines[9] == "and 3 more: mlhpc records list --session s1 --limit 1000"


def test_last_names_the_state_folder_in_each_command_where_it_was_given() -> None:
    records = [record(n, verdict=v) for n, v in enumerate(["regressed", "improved", *["worker_exit"] * 3])]
    commands = [
        line for line in lines_of(records, ("--state-dir=/a b",)) if "pytest " in line or "mlhpc " in line
    ]
    assert len(commands) == 5
    assert all(line.endswith(" '--state-dir=/a b'") for line in commands)


def test_last_of_a_good_session_is_one_line() -> None:
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


def test_learning_runs_the_tests_and_accepts_the_medians(state_dir: Path, in_a_project: Path) -> None:
    (in_a_project / "test_learnt.py").write_text(LEARNT)
    (in_a_project / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--no-rerun', action='store_true')\n"
        "    parser.addoption('--baselines-dir')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = mlhpc(
        "baseline", "learn", "--runs", "3", "--reason", "new", "--", "-q", "test_learnt.py", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "rate: 101 samples/s (median of 3 runs)" in done.stdout
    text = (in_a_project / "baselines" / "cirrus.yaml").read_text()
    assert "runs: 3" in text
    assert "spread: 0.014" in text


def test_learning_from_a_session_that_cannot_start_accepts_nothing(in_a_project: Path) -> None:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = mlhpc("baseline", "learn", "--reason", "new", "--", "absent.py", env=environment)
    assert done.returncode == 4
    assert "pytest ended with exit code 4; nothing is accepted" in done.stderr
    assert not (in_a_project / "baselines").exists()
