"""Baselines as a user meets them: new, kept, regressed, improved, missing, accepted; and history beside them."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from inner_sessions import output

from pytest_mlhpc.cli import main
from pytest_mlhpc.history.events import add, new_event
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.session.terminal import unused_baselines
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import Store
from pytest_mlhpc.store.text import iso

DAY = 86_400 * 10**9

SUITE = """
@script("echo rate: ${RATE:-100}")
def test_it(run, baseline):
    assert run >= baseline

@script("echo rate: ${RATE:-100}", name="silent")
def test_body_does_not_compare():
    pass
"""


@pytest.fixture
def judged(suite, monkeypatch):
    """Return how to run a suite at a rate, after its two tests were run once at a rate of 100."""
    suite.write(SUITE)
    suite.run().expect(0, "2 new series recorded; to accept: mlhpc baseline accept *", passed=2, warnings=0)

    def run_at(rate: float, *arguments: str, run=suite.run, **options):
        monkeypatch.setenv("RATE", str(rate))
        return run(*arguments, **options)

    return run_at


def test_in_ci_a_missing_baseline_fails(suite, monkeypatch):
    monkeypatch.setenv("CI", "true")
    suite.write(SUITE)
    printed = output(suite.run().expect(1, failed=2))
    said = [line for line in printed.splitlines() if line.startswith("no_baseline: ")]
    (sentence,) = [line for line in said if "test_it[" in line]
    assert sentence.startswith(
        "no_baseline: rate of test_suite.py::test_it has none in baselines/local.yaml; "
    )
    assert "; to accept what was measured: mlhpc baseline accept" in sentence
    assert not (suite.state / "provisional").exists()


def test_an_accepted_value_of_a_test_below_a_folder_that_is_no_utf8_is_found_again(suite):
    (suite.folder / os.fsdecode(b"t\xe9sts")).mkdir()
    suite.write(SUITE, os.fsdecode(b"t\xe9sts/test_suite.py"))
    alone = ("-p", "no:cacheprovider")  # pytest's cache cannot write such a name
    suite.run(*alone, "--mlhpc-baseline=update").expect(0, "baselines of 2 series written*", passed=2)
    suite.run(*alone, "--mlhpc-baseline=fail").expect(0, absent="*no test uses*", passed=2)


def test_on_a_site_a_series_is_new_each_night_until_all_of_a_session_are_accepted(suite, monkeypatch):
    suite.write(SUITE)
    for _night in range(2):
        printed = output(suite.run(system="site").expect(0, "*new", passed=2))
        assert printed.count("2 new series recorded; to accept: mlhpc baseline accept ") == 1
    monkeypatch.chdir(suite.folder)
    assert main(["baseline", "accept", suite.records()[-1]["session"], "--reason", "first night"]) == 0
    assert suite.records()[-1].get("fences", {}) == {}
    suite.run(system="site").expect(0, "*passed", absent="*to accept*", passed=2)
    assert suite.records()[-1]["fences"] == {"rate": {"accepted": 100.0, "width": 0.05}}
    assert main(["baseline", "accept", suite.records()[-1]["session"], "--reason", "again"]) == 2


def test_on_a_site_eight_nights_settle_a_level_that_later_nights_are_judged_by(suite, monkeypatch):
    suite.write(SUITE)
    monkeypatch.setenv("MLHPC_PURPOSE", "nightly")
    monkeypatch.setenv("CI_COMMIT_BRANCH", "main")
    for night in range(1, 9):
        printed = output(suite.run(system="site").expect(0, f"*new, {night} of 8 nights", passed=2))
    settled = "2 series judged by the level of their first 8 nights, not in git yet; to accept: *"
    suite.run(system="site").expect(0, "*passed", settled, passed=2)
    monkeypatch.setenv("RATE", "50")
    suite.run(system="site").expect(1, "rate 50 items/s: 50 % below 100 (*re-runs agree)", failed=2)
    assert "to accept" in printed


def test_a_baseline_that_a_month_of_red_nights_disagrees_with_is_wrong_and_is_accepted_anew(
    suite, monkeypatch, capsys
):
    suite.write(SUITE)
    monkeypatch.setenv("MLHPC_PURPOSE", "nightly")
    monkeypatch.setenv("CI_COMMIT_BRANCH", "main")
    suite.run(system="site").expect(0, passed=2)
    monkeypatch.chdir(suite.folder)
    first = next(one for one in suite.records() if "test_it" in one["node_id"])
    assert main(["baseline", "accept", first["node_id"], "--reason", "first run"]) == 0
    file = Path("baselines/site.yaml")
    file.write_text(re.sub(r"date: .*", f"date: {iso(time.time_ns() - 40 * DAY)}", file.read_text()))
    shutil.rmtree(suite.state / "records")
    for index in suite.state.glob("index*"):
        index.unlink()
    month_at(suite.state, from_json(Record, first), 92.0)
    capsys.readouterr()

    monkeypatch.setenv("RATE", "92")
    said = output(suite.run(system="site").expect(0, "*wrong_baseline", passed=2))
    assert "1 baseline is wrong: a month without a change lies elsewhere" in said
    assert f"mlhpc baseline accept '{first['node_id']}' --reason TEXT" in said
    assert main(["status", "--night"]) == 0
    page = capsys.readouterr().out
    assert "test_it[site:part] (its baseline is wrong)" in page
    suite.run(system="site").expect(0, absent="*baseline is wrong*", passed=2)

    session = next(one["session"] for one in suite.records() if one["verdict"] == "wrong_baseline")
    assert main(["baseline", "accept", session, "--reason", "lucky run"]) == 0
    assert "value: 92.0" in file.read_text()
    assert 'reason: "lucky run (level of 30 nights)"' in file.read_text()


def month_at(state, first, rate):
    """Record thirty nights at *rate*, in which the test failed."""
    (metric,) = [one for one in first.measurement.metrics if one.name == "rate"]
    measured = replace(first.measurement, metrics=(replace(metric, value=rate),))
    with contextlib.closing(Store(state, "01890000-0000-7000-8000-000000000000")) as store:
        for night in range(30):
            store.append(
                replace(
                    first,
                    id=f"01890000-0000-7000-8000-{night:012d}",
                    session=f"01890000-0000-7000-9000-{night:012d}",
                    created_ns=time.time_ns() - (30 - night) * DAY,
                    verdict="regressed",
                    failure="regressed: rate",
                    measurement=measured,
                )
            )


def test_a_figure_below_its_reference_fails_on_the_first_night(suite):
    suite.write("""
    @script("echo rate: 90", reference={"local": 100})
    def test_it(run): assert run["rate"] == 90
    """)
    lines = (
        "rate 90 items/s: 10 % below 100 (the reference; * re-runs agree)",
        "*below_reference",
    )
    suite.run().expect(1, *lines, failed=1)
    assert {record["verdict"] for record in suite.records()} >= {"below_reference"}


def test_a_provisional_baseline_is_reported_until_it_is_updated(judged):
    judged(100).expect(0, "2 series judged by provisional baselines of this machine; to accept: *", passed=2)
    update = "--mlhpc-baseline=update"
    judged(100, update).expect(0, "baselines of 2 series written to baselines/local.yaml", passed=2)
    nothing = "no baseline written: 2 series agree with their baselines, which stay as they are"
    judged(100, update).expect(0, nothing, passed=2)
    judged(100).expect(0, absent="*to accept*", passed=2)


def test_re_runs_that_share_an_allocation_confirm_as_others_do(judged):
    judged(50, "--mlhpc-pack").expect(1, "*re-runs agree*", failed=2, absent="*launch_failed*")


@pytest.mark.parametrize(
    "run", [pytest.param("run", id="alone"), pytest.param("run_workers", marks=pytest.mark.servers)]
)
def test_a_regression_is_confirmed_by_reruns_and_explained(suite, judged, run):
    lines = (
        "E * assert run >= baseline",
        "E * rate 50 items/s: 50 % below 100 (*re-runs agree)",
        "*- why -*",
        "rate 50 items/s: 50 % below 100 (*re-runs agree)",
        "  regressed: the fence is 10.0%; re-runs: 50, *",
        "to accept the new value: mlhpc baseline accept*",
        "test_it?local:cpu?*50 items/s*100*-50.0 %*regressed",
    )
    judged(50, run=getattr(suite, run)).expect(1, *lines, absent="*truncated*", failed=2)
    attempts = [record["attempt"] for record in suite.records() if "test_it[" in record["node_id"]]
    assert len(attempts) > 3  # the first night, tonight, and at least two re-runs


def test_a_body_that_bows_out_does_not_hide_a_regression(suite, monkeypatch):
    suite.write("""
    @script("echo rate: $RATE")
    @pytest.mark.parametrize("name", ["skip", "xfail", "return"])
    def test_it(run, name):
        if name != "return": getattr(pytest, name)("no reason")
    """)
    monkeypatch.setenv("RATE", "100")
    assert suite.run().ret == 0
    monkeypatch.setenv("RATE", "50")
    result = suite.run("--mlhpc-reruns=0")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["rate 50 items/s: 50 % below 100 (one run, *)"] * 3)
    assert {record["attempt"] for record in suite.records()} == {0}


def test_reruns_of_a_session_are_limited(suite, judged):
    judged(50, "--mlhpc-reruns", "4")
    assert sum(record["attempt"] > 0 for record in suite.records()) <= 4


def test_update_baselines_accepts_a_slower_value(suite, judged):
    judged(50, "--mlhpc-baseline=update").assert_outcomes(passed=2)
    assert "value: 50" in (suite.folder / "baselines" / "local.yaml").read_text()
    judged(50).assert_outcomes(passed=2)


def test_an_improvement_passes_with_a_warning_even_where_warnings_are_errors(judged):
    judged(200, "-W", "error").expect(
        0,
        "*ImprovedWarning: rate 200 items/s: 100 % above 100",
        "*mlhpc baseline accept*",
        passed=2,
        warnings=2,
    )


UNUSED = "baseline entries that no test uses, in baselines; *"


def test_unused_baselines_are_listed_by_a_whole_run_only(suite, judged):
    suite.write(SUITE.replace('name="silent"', 'name="renamed"'))
    suite.run().stdout.fnmatch_lines([UNUSED, "*silent: rate"])
    suite.run("-k", "test_it").stdout.no_fnmatch_line(UNUSED)


def test_a_misspelt_baseline_names_what_it_was_meant_for(suite, judged):
    judged(100, "--mlhpc-baseline=update")
    file = suite.folder / "baselines" / "local.yaml"
    file.write_text(file.read_text().replace("benchmark: silent", "benchmark: silend"))
    hint = "*silend: rate (did you mean 'silent: rate', which has no baseline?)"
    judged(100).expect(0, UNUSED, hint, passed=2)


def test_a_misspelt_partition_or_environment_of_a_baseline_is_named_whatever_runs(suite, judged):
    judged(100, "--mlhpc-baseline=update")
    file = suite.folder / "baselines" / "local.yaml"
    text = file.read_text()
    for line, said in (
        ("partition: cpu", "local has no partition 'cpv' (did you mean 'cpu'?): 2 entries"),
        (
            "environment: default",
            "local:cpu has no environment 'defavlt' (did you mean 'default'?): 2 entries",
        ),
    ):
        file.write_text(text.replace(line, line.replace("u", "v")))
        places = "baseline entries of places that the systems file does not have:"
        judged(100, "-k", "test_it").expect(0, places, f"  {said}", passed=1)


def test_a_baseline_file_of_a_misspelt_system_is_named(suite, judged):
    judged(100, "--mlhpc-baseline=update")
    folder = suite.folder / "baselines"
    text = (folder / "local.yaml").read_text()
    (folder / "local.yaml").unlink()
    for system in ("loacl", "elsewhere"):
        (folder / f"{system}.yaml").write_text(text.replace("system: local", f"system: {system}"))
    judged(100).expect(
        0,
        "baseline entries of places that the systems file does not have:",
        "  there is no system 'loacl' (did you mean 'local'?): all of its file",
        absent="*elsewhere*",
        passed=2,
    )


CHANGED = "1 series begins a new epoch, not compared with earlier ones (test_it?local:cpu?: {}); to accept: mlhpc baseline accept *"
COMMAND = 'command ["sh","-c","echo rate: ${RATE:-100}"] -> ["sh","-c","echo rate: ${RATE:-100} # other"]'


@pytest.mark.parametrize("run", ["run", pytest.param("run_workers", marks=pytest.mark.servers)])
def test_another_definition_begins_a_new_epoch_that_is_not_compared_with_the_old_one(suite, judged, run):
    suite.write(SUITE.replace(":-100}", ":-100} # other", 1))
    said = CHANGED.format(COMMAND.replace("[", "?").replace("]", "?"))
    judged(50, "-k", "test_it", run=getattr(suite, run)).expect(0, said, "*50 items/s*new", passed=1)
    changed = suite.records()[-1]
    assert changed["benchmark"] == "test_suite.py::test_it"
    assert "# other" in changed["definition"]
    assert "a new epoch begins" in changed["explanation"][0]
    judged(50, "-k", "test_it").expect(0, "*50 items/s*50 items/s*passed", absent="*new epoch*", passed=1)
    suite.write(SUITE)
    judged(100, "-k", "test_it").expect(0, "*begins a new epoch*", passed=1)


def test_an_accepted_value_of_an_earlier_epoch_fails_in_ci_and_can_be_updated(suite, judged):
    judged(100, "--mlhpc-baseline=update")
    suite.write(SUITE.replace(":-100}", ":-100} # other", 1))
    reason = "no_baseline: rate: its baseline is of an earlier epoch (command *) in baselines/local.yaml; to accept *"
    judged(50, "--mlhpc-baseline=fail", "-k", "test_it").expect(1, reason, failed=1)
    written = "baselines of 1 series written to baselines/local.yaml; new epochs begin: test_it?local:cpu?: command *"
    judged(50, "--mlhpc-baseline=update", "-k", "test_it").expect(0, written, passed=1)
    judged(50, "--mlhpc-baseline=fail").expect(1, "*test_body*regressed", passed=1, failed=1)


def test_a_series_is_accepted_by_the_name_of_its_test(suite, judged, monkeypatch):
    monkeypatch.chdir(suite.folder)
    assert main(["baseline", "accept", "test_suite.py::test_it", "silent", "--reason", "why"]) == 0
    text = (suite.folder / "baselines" / "local.yaml").read_text()
    assert "- benchmark: silent\n" in text
    assert '- benchmark: "test_suite.py::test_it"\n' in text
    judged(100).expect(0, absent="*to accept*", passed=2)


@pytest.mark.parametrize(
    ("tests", "arguments", "outcomes"),
    [
        (SUITE.replace("echo rate:", "exit 3; echo rate:", 1), (), {"passed": 1, "failed": 1}),
        (SUITE.replace("@script", "@pytest.mark.skip\n@script", 1), (), {"passed": 1, "skipped": 1}),
        (
            f"def test_first():\n    pass\n{SUITE.replace('assert run >= baseline', 'assert 0')}",
            ("-x",),
            {"passed": 1, "failed": 1},
        ),
    ],
    ids=["whose run broke", "that is skipped", "after which the session stops"],
)
def test_no_baseline_is_unused_because_of_a_test(suite, judged, tests, arguments, outcomes):
    suite.write(tests)
    judged(100, *arguments).expect(int("failed" in outcomes), absent=UNUSED, **outcomes)


@pytest.mark.parametrize(
    "option", ["keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob"]
)
def test_workers_that_leave_tests_out_make_no_baseline_unused(option):
    """They count what they leave out by themselves, so that the options alone tell their controller."""
    reporter = SimpleNamespace(stats={})
    session = SimpleNamespace(
        deselected=[], jobs={}, unused_baselines=lambda: ("a: rate",), unaccepted=frozenset
    )
    for options, unused in ({option: None}, ["a: rate"]), ({option: "given"}, []):
        config = SimpleNamespace(args=[], option=SimpleNamespace(**options))
        assert unused_baselines(reporter, session, config) == unused


def test_commands_to_repeat_and_to_accept_name_folders_that_are_not_the_default(suite, judged, tmp_path):
    state, accepted = tmp_path / "a state", tmp_path / "accepted"
    folders = (f"--mlhpc-state={state}", "-o", f"mlhpc_baselines_dir={accepted}")
    judged(100, *folders, "--mlhpc-baseline=update").assert_outcomes(passed=2)
    result = judged(50, *folders, "--mlhpc-reruns=0").expect(1, failed=2)
    of_mlhpc = shlex.join([f"--state-dir={state}", f"--baselines-dir={accepted}"])
    assert f"--system local:cpu {shlex.join(folders)}" in result.stdout.str()
    assert f"--reason TEXT {of_mlhpc}" in result.stdout.str()


def test_a_regression_names_the_event_that_was_noted_since_the_last_good_run(suite, judged):
    now_ns = time.time_ns()
    add(suite.state, new_event("local", "", "driver 570 to 580", at_ns=now_ns, by="me", now_ns=now_ns))
    judged(50, "--mlhpc-reruns=0").expect(1, "*noted on *: driver 570 to 580 (event *)*", failed=2)


def test_an_influx_that_does_not_answer_is_reported_once_and_fails_nothing(judged, monkeypatch):
    monkeypatch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MLHPC_INFLUX_PUSH", "no")
    printed = output(
        judged(100, "-o", "mlhpc_history=influx", "-o", "mlhpc_infra_exit_code=75").expect(75, passed=2)
    )
    assert printed.count("history is read from the local store, as InfluxDB failed: ") == 1


def test_a_session_is_judged_again_on_another_machine_from_its_records_alone(
    suite, monkeypatch, tmp_path, capsys
):
    suite.write(SUITE)
    monkeypatch.setenv("MLHPC_PURPOSE", "nightly")
    monkeypatch.setenv("CI_COMMIT_BRANCH", "main")
    for rate in (*[100] * 9, 50):
        monkeypatch.setenv("RATE", str(rate))
        suite.run(system="site").expect(rate == 50)
    session = suite.records()[-1]["session"]
    there = tmp_path / "another machine"
    shutil.copytree(suite.state, there)
    monkeypatch.chdir(tmp_path)
    command = ["records", "rejudge", session, "--state-dir", str(there)]
    assert main(command) == 0
    assert capsys.readouterr().out == "2 runs of 2 judged as recorded\n"

    for file in (there / "records").rglob("*.jsonl"):
        if session not in file.read_text():
            file.unlink()
    (there / "index.sqlite").unlink(missing_ok=True)
    assert main(command) == 1
    assert "test_it[site:part]: verdict: recorded regressed, now new\n" in capsys.readouterr().out
    assert main(["records", "rejudge", "nobody's", "--state-dir", str(there)]) == 2


@contextlib.contextmanager
def busy_loops(count):
    """Keep processors busy with processes that do nothing else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        before = contention.snapshot()
        time.sleep(1)
        late = contention.late_figures(before, 1.0, 0.0)
        if not contention.crowding([{**late, "own_cores": 0.0}]):
            pytest.skip("this container may not have all processors of its machine")
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.servers
def test_a_training_that_others_crowd_out_is_an_error_and_feeds_nothing(suite):
    suite.write("""
    @train("cosmoflow", steps=160, warmup=4)
    def test_it(run): pass
    """)
    suite.run().expect(0, passed=1)
    (accepted,) = suite.state.glob("provisional/*.yaml")
    text = accepted.read_text()
    accepted.write_text(re.sub(r"value: [0-9.e+]+", "value: 1e9", text))  # what is usual now is out of reach
    before = accepted.read_bytes()

    with busy_loops(2 * os.cpu_count()):
        suite.run("-o", "mlhpc_infra_exit_code=75").expect(
            75, "*machine_busy: on this node *", passed=0, errors=1
        )

    assert suite.verdicts() == ["new", "machine_busy"]
    assert (suite.records()[1].get("measurement"), accepted.read_bytes()) == (None, before)
