"""The command `mlhpc`: what people type, what they get, and how it ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_calls import options_of, parsed
from nights_of import store
from worlds import measurement, record

from pytest_mlhpc import cli
from pytest_mlhpc.cli import COMMANDS, main
from pytest_mlhpc.report.morning import session_morning
from pytest_mlhpc.store.record import Record, RecordedVetting

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
        ended = main(words)
        out, err = capfd.readouterr()
        assert ended == code, out + err
        assert "Traceback" not in out + err
        if code in {2, 4}:
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
        ("x" * 50, "No such command"),
        ("vet depp", "did you mean 'deep'?"),
        ("history chagnes", "did you mean 'changes'?"),
        ("records cost --by systme", "did you mean 'system'?"),
        ("--nonsense", "No such option"),
        ("baseline", "Usage: mlhpc baseline"),
        ("baseline accept NODE", "--reason"),
        ("baseline accept NODE --reason ' '", "must say why"),
        ("baseline accept NODE --reason TEXT", "must say why"),
        ("baseline accept NODE --reason new-compiler", "nothing was recorded for"),
        ("baseline show archer", "has no accepted values"),
        ("baseline show ../x", "cannot be a file name"),
        ("records show 0189", "no record's id starts with '0189'"),
    ],
)
def test_a_usage_error_exits_with_2_and_one_clear_message(mlhpc, words, message):
    assert message in mlhpc(*shlex.split(words.replace("NODE", NODE)), code=2)


def test_a_damaged_baseline_file_is_named_with_its_line(mlhpc, project):
    (project / "baselines").mkdir()
    (project / "baselines" / "cirrus.yaml").write_text("schema: 2\nsystem: cirrus\nseries: 5\n")
    assert "baselines/cirrus.yaml:3: series: must be a list" in mlhpc("baseline", "show", "cirrus", code=2)


def test_a_file_that_cannot_be_written_is_named(mlhpc, state_dir, project):
    fill(state_dir, record(1))
    (project / "baselines").write_text("in the way")
    assert "baselines" in mlhpc("baseline", "accept", NODE, "--reason", "new compiler", code=4)


def test_a_closed_pipe_ends_quietly(state_dir):
    fill(state_dir, record(1))
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "records", "list"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


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


def test_a_test_is_accepted_by_its_node_id_without_the_target_where_its_identity_is_shorter(mlhpc, state_dir):
    fill(
        state_dir,
        record(1, node_id="s/test_ci.py::test_ci[cirrus:standard]", benchmark="test_ci.py::test_ci"),
    )
    assert "accepted: test_ci.py::test_ci rate: " in mlhpc(
        "baseline", "accept", "s/test_ci.py::test_ci", "--reason", "r"
    )


def test_a_record_is_accepted_by_the_start_of_its_id(mlhpc, state_dir):
    fill(state_dir, record(1, 70.0), record(2, 80.0))
    assert "rate: 70 samples/s (one run)" in mlhpc(
        "baseline", "accept", record(1).id, "--reason", "the quiet one"
    )


def test_a_broken_run_is_not_accepted(mlhpc, state_dir, project):
    fill(state_dir, record(1, verdict="too_few_steps"))
    message = mlhpc("baseline", "accept", NODE, "--reason", "why not", code=2)
    assert "its last run ended as too_few_steps" in message
    assert not (project / "baselines").exists()


def test_diff_shows_what_changed_since(mlhpc, state_dir):
    fill(state_dir, record(1, 100.0))
    mlhpc("baseline", "accept", NODE, "--reason", "first")
    fill(state_dir, record(2, 90.0, verdict="regressed"))
    assert "-10.0% (worse)" in mlhpc("baseline", "diff", "cirrus")
    assert json.loads(mlhpc("baseline", "diff", "--json"))["baselines"][0]["newest"] == 90.0


def test_a_record_of_a_run_that_measured_nothing_is_shown(mlhpc, state_dir):
    fill(state_dir, record(1, verdict="worker_exit", failure="worker_exit: died", measurement=None))
    assert "failure: worker_exit: died" in mlhpc("records", "show", record(1).id).splitlines()


def test_records_are_listed_shown_and_checked(mlhpc, state_dir):
    fill(state_dir, record(1))
    (path,) = state_dir.glob("records/*/*.jsonl")
    assert "rate 100 samples/s" in mlhpc("records", "list")
    lines = mlhpc("records", "show", record(1).id).splitlines()
    assert f"id: {record(1).id}" in lines
    assert not [line for line in lines if line.endswith((": null", ": ", ": []", ": {}"))]
    assert lines[-2].split() == ["metric", "value", "better"]
    shown = json.loads(mlhpc("records", "show", record(1).id, "--json"))
    assert (shown["schema"], shown["record"]["benchmark"]) == ("mlhpc/records-show/1", record(1).benchmark)
    assert "1 record in " in mlhpc("records", "check", "--rebuild-index")
    with path.open("ab") as file:
        file.write(b"torn")
    assert f"{path}: byte" in mlhpc("records", "check", code=1)


def test_text_that_a_terminal_would_obey_is_not_printed(mlhpc, state_dir):
    fill(state_dir, record(1, node_id="evil\x1b[2Jname\nnext", verdict="worker_exit", failure="\x1b]0;x\x07"))
    for words in (["records", "list"], ["status"]):
        assert "\x1b" not in mlhpc(*words)


@pytest.mark.parametrize("words", [["history", "m\udce9"], ["records", "show", "m\udce9"]])
def test_arguments_that_are_no_utf8_are_answered(state_dir, words):
    done = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", *words], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert rb"'m\udce9'" in done.stderr


def test_status_of_nothing_says_what_can_be_run_here(mlhpc, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert mlhpc("status").endswith("; run: mlhpc init\n")
    Path("suites").mkdir()
    assert mlhpc("status").endswith("; run: pytest suites/ --system local\n")


def test_status_shows_five_problems_of_a_session_each_with_its_reason_and_a_command(mlhpc, state_dir):
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
        record(9, explanation=("rate: 15% worse",), options=("--mlhpc-preset", "large"), **slow),
        record(10, attempt=1, **slow),
    )
    lines = mlhpc("status").splitlines()
    assert "session s1: 1 passed, 1 improved, 5 worker_exit, 1 regressed" in lines[0]
    rerun = "pytest t.py::slow --system cirrus:standard --mlhpc-preset large"
    assert lines[1:4] == ["regressed: t.py::slow", "  rate: 15% worse", f"  next: {rerun}"]
    assert sum(line.startswith("worker_exit: ") for line in lines) == 4
    assert lines[-2] == "and 1 more: mlhpc records list --session s1 --limit 1000"
    assert lines[-1] == "improved: 1 test: better: mlhpc baseline accept t.py::better --reason TEXT"


def test_status_names_the_state_folder_in_each_command_where_it_was_given():
    verdicts = ["regressed", "improved", "no_baseline", *["worker_exit"] * 7]
    records = [record(n, verdict=v) for n, v in enumerate(verdicts)]
    commands = [
        line
        for line in session_morning(records, ("--state-dir=/a b",)).lines()
        if "pytest " in line or "mlhpc " in line
    ]
    assert len(commands) == 8
    ends = {"pytest": " '--mlhpc-state=/a b'", "mlhpc": " '--state-dir=/a b'"}
    assert [
        line for line in commands if not line.endswith(ends["pytest" if "pytest " in line else "mlhpc"])
    ] == []


def test_status_of_a_good_session_is_one_line():
    assert len(session_morning([record(1), record(2)]).lines()) == 1


@pytest.mark.parametrize("verdict", ["new", "no_baseline"])
def test_status_of_a_first_session_says_how_to_accept_it(verdict):
    assert (
        session_morning([record(1, verdict=verdict)])
        .lines()[1]
        .startswith("waiting to be accepted: 1 test: test_a[cirrus:standard]: mlhpc baseline accept")
    )


def test_many_tests_are_accepted_by_their_session():
    records = [record(number, verdict="new", node_id=f"test_it.py::test_{number}") for number in range(1, 6)]
    assert (
        f": mlhpc baseline accept {records[0].session} --reason TEXT" in session_morning(records).lines()[1]
    )


def test_status_for_programs_has_what_its_lines_are_made_of(mlhpc, state_dir):
    vetting = RecordedVetting(
        "quick", 9.0, fit=("n1",), unfit={"n3": "[node_problem] a GPU fell off the bus"}
    )
    fill(
        state_dir,
        *(
            record(number, verdict=verdict, node_id=f"t.py::{verdict}", purpose="manual", explanation=(f"{verdict}!",))
            for number, verdict in enumerate(("passed", "regressed", "never_scheduled", "inconclusive", "improved"))
        ),
        record(8, node_id="t.py::vetted", purpose="manual", vetting=vetting),
    )  # fmt: skip
    data = json.loads(mlhpc("status", "--json"))
    assert (data["schema"], data["kind"], data["systems"]) == ("mlhpc/status/1", "session", ["cirrus"])
    assert data["counts"]["regressed"] == 1
    sections = {
        "act_now": "regressed",
        "did_not_run": "never_scheduled",
        "watching": "inconclusive",
        "improved": "improved",
    }
    assert {name: [one["verdict"] for one in data[name]] for name in sections} == {
        name: [verdict] for name, verdict in sections.items()
    }
    (slow,) = data["act_now"]
    assert (slow["tests"], slow["reason"]) == (["t.py::regressed"], "regressed!")
    assert slow["command"].startswith("pytest t.py::regressed --system cirrus:standard")
    reason = "[node_problem] a GPU fell off the bus"
    assert data["nodes_out"] == [
        {"system": "cirrus", "partition": "standard", "node": "n3", "reason": reason}
    ]
    assert data["still_open"] == []
    assert f"nodes out: n3 of cirrus ({reason}): mlhpc vet history" in mlhpc("status").splitlines()


def commands(group=cli.mlhpc, path=("mlhpc",)):
    """Yield every command with the words that name it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield [*path, name], command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*one, id=" ".join(one[0])) for one in commands()]
)
def test_every_command_says_a_sentence_and_shows_an_example_that_is_one(words, command):
    text = command.get_help(click.Context(command, info_name=" ".join(words)))
    assert command.help.partition(". ")[0].rstrip(".")
    assert f"Example:\n  {command.example.splitlines()[0]}" in text
    for line in re.findall(r"mlhpc [^|]*?(?= \|\||$)", command.example, re.MULTILINE):
        assert parsed(*shlex.split(line)[1:]) is not None


def test_there_are_at_most_sixteen_commands_and_all_are_on_the_page():
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    assert len(COMMANDS) <= 16
    assert [name for words, _ in commands() if (name := words[-1]) not in page] == []


#: Commands whose output is a file of a form of its own.
DOCUMENTS = {"systems schema", "report html", "report grafana", "report openmetrics", "papers mlperf log"}

#: Commands of which the object is looked at where the server, the alert, the suite or the repository is that they need.
ELSEWHERE = {
    "baseline propose",
    "records push",
    "alert ack",
    "alert drill",
    "history bisect",
    "vet drain",
    "vet undo",
    "ci pipelines",
}

#: All others: what is typed after the words, in a project with two nights of one test. `code`: another exit code.
PRINTS = {
    "init": {}, "systems check": {}, "systems add": {"after": "archer2"}, "baseline accept": {"after": f"{record(1).id} --reason r"},
    "alert mute": {"after": "cirrus --until 2d"}, "data make": {"after": "cosmoflow set --samples 2 --preset smoke"},
    "status": {}, "check": {}, "systems list": {}, "systems show": {"after": "local"}, "baseline show": {}, "baseline diff": {},
    "history show": {"after": "test_a"}, "history changes": {}, "history sensitivity": {}, "history event add": {"after": "--system cirrus driver"},
    "history event list": {}, "history event remove": {"after": "EVENT"}, "compare": {"after": "cirrus"}, "records list": {},
    "records show": {"after": record(1).id}, "records rejudge": {"after": record(1).session}, "records cost": {}, "records check": {}, "records usage": {},
    "records prune": {"after": "--older 2y"}, "records ingest": {"after": "--jsonl log.txt", "code": 1}, "alert send": {}, "alert list": {},
    "vet quick": {"after": "--no-load"}, "vet deep": {"after": "--no-load"}, "vet history": {},
    "screen": {"end": "--seconds 1 -- sleep 1"}, "data check": {}, "data workloads": {}, "ci note": {},
    "papers mlperf check": {"after": "log.txt", "code": 1}, "papers mlperf report": {}, "papers ai500": {"after": "cirrus"},
    "papers mlperf package": {"after": "--org EPCC --division open --output EPCC"},
    "papers tables": {"after": "cirrus"}, "papers roofline": {}, "reap": {},
}  # fmt: skip


def test_every_command_but_those_that_write_documents_says_as_an_object_what_it_found_or_did():
    known = {" ".join(words[1:]) for words, command in commands() if not isinstance(command, click.Group)}
    assert known == DOCUMENTS | ELSEWHERE | {*PRINTS}
    words = [*ELSEWHERE, *PRINTS]
    assert [one for one in words if not {"--json", "--output"} <= options_of(*one.split())] == []


@pytest.mark.parametrize("words", PRINTS)
def test_a_command_prints_one_object_with_its_schema(words, state_dir, project, mlhpc):
    fill(state_dir, record(1), record(2))
    (project / "log.txt").write_text("no log of MLPerf\n")
    typed = PRINTS[words]
    after = str(typed.get("after", ""))
    if after == "EVENT":
        event = json.loads(mlhpc("history", "event", "add", "--system", "cirrus", "driver", "--json"))
        after = event["event"]["id"]
    line = shlex.split(f"{words} {after} --json {typed.get('end', '')}")
    # The first two change this process: they take its signals, and end it.
    printed = called(*line) if line[0] in {"screen", "vet"} else mlhpc(*line, code=typed.get("code", 0))
    data = json.loads(printed)
    assert data["schema"] == f"mlhpc/{words.replace(' ', '-')}/1"
    assert len(data) > 1


def called(*words: str) -> str:
    """Run a command in a process of its own and return what it prints."""
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_screened_program_may_print_besides_the_object(project):
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.cli",
        "screen",
        "--seconds",
        "1",
        "--json",
        "--",
        "sh",
        "-c",
        "echo mine; sleep 1",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "mine\n" in done.stderr
    data = json.loads(done.stdout)
    assert data["what"].startswith("sh -c")
    assert {"seconds", "ranks", "nodes", "findings", "not_seen"} <= {*data}


@pytest.mark.parametrize("line", ["papers roofline --json --output -", "ci note --json --output notes"])
def test_two_reports_to_one_place_are_refused(line, mlhpc):
    assert "--json" in mlhpc(*line.split(), code=2)


def test_what_is_found_can_be_written_to_a_file(mlhpc, state_dir, project):
    fill(state_dir, record(1))
    assert mlhpc("records", "list", "--json", "--output", "out.json") == ""
    assert json.loads((project / "out.json").read_text())["records"][0]["id"] == record(1).id


@pytest.mark.parametrize(
    "words",
    ["records list", "records cost", "baseline show", "baseline diff", "history changes", "history sensitivity", "history event list", "alert list",
     "alert send", "status", "vet history", "compare local", "papers tables local", "papers ai500 local", "papers mlperf report",
     "papers roofline", "report html --output out.html", "report openmetrics", "ci note"],
)  # fmt: skip
def test_where_nothing_is_recorded_that_is_said_in_a_sentence(words, capfd, project):
    assert main(shlex.split(words)) == 0
    printed = capfd.readouterr()
    assert re.search(r"\bno(thing|ne)?\b", printed.out + printed.err)
    assert list(project.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["status", "records list", "records cost", "history changes", "history sensitivity", "alert list", "vet history",
     "report html --output out.html", "report openmetrics"],
)  # fmt: skip
def test_commands_that_only_read_make_no_state_directory(words, capfd, project):
    main([*shlex.split(words), "--state-dir", "mistyped/state"])
    capfd.readouterr()
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell):
    environ = {**os.environ, "_MLHPC_COMPLETE": f"{shell}_source"}
    code = "import sys; from pytest_mlhpc.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", code]
    source = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert "_MLHPC_COMPLETE" in source.stdout, source.stderr
    environ |= {
        "_MLHPC_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "mlhpc rec",
        "COMP_CWORD": "rec" if shell == "fish" else "1",
    }
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert "records" in done.stdout, done.stderr
