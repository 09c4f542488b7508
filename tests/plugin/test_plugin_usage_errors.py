"""What cannot be run is refused as a whole: all problems at once, exit code 4, no traceback, nothing started."""

from __future__ import annotations

import pytest
from inner_sessions import ONE_JOB, Suite, cases, output

REFUSALS = cases("refusals.yaml")

#: A test file that says whether it was imported.
IMPORTED = "pathlib.Path('imported').touch()\n"

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 5)}]" for n in range(1, 30))]
)

KUBERNETES = """
@job(kubernetes={"imge": "torch"}, judge=False)
def test_it(run): assert run["rate"].value == 4.0
"""


def contents(suite: Suite) -> dict[str, bytes]:
    """Return the files of the suite, but for pytest's own cache."""
    files = [path for path in suite.folder.rglob("*") if path.is_file() and ".pytest_cache" not in path.parts]
    return {str(path.relative_to(suite.folder)): path.read_bytes() for path in files}


def assert_refused(suite: Suite, result: pytest.RunResult, *texts: str) -> None:
    """Assert that a session ended as a usage error that says each text once, and wrote nothing."""
    printed = output(result)
    assert result.ret == 4, printed
    assert [printed.count(text) for text in texts] == [1] * len(texts), printed
    assert "Traceback" not in printed
    assert "INTERNALERROR" not in printed
    assert suite.nothing_was_written()


def test_a_folder_of_an_option_that_moves_pytests_root_is_refused_as_benchmarks_would_get_other_names(suite):
    suite.write(ONE_JOB)
    (suite.folder / "pytest.ini").unlink()
    outside = suite.folder.parent / "outside"
    outside.mkdir()
    result = suite.run("test_suite.py", "--baselines-dir", str(outside))
    assert_refused(suite, result, f"write --baselines-dir={outside}")
    suite.run("test_suite.py", f"--baselines-dir={outside}").expect(0, passed=1)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_run_is_refused_and_named(suite, monkeypatch, name):
    for variable in ("MLHPC_INFLUX_URL", "SLURM_JOB_ID", "MY_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    case = REFUSALS[name]
    suite.write(case.get("tests", IMPORTED))
    for file, text in case.get("files", {}).items():
        suite.file(file, text)
    before = contents(suite)
    result = suite.run(*case.get("options", "").split(), system=case.get("system", "local"))
    assert_refused(suite, result, *case["printed"])
    assert contents(suite) == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xfe\xff", "systems.yaml:1: byte 0xfe is not UTF-8"),
        (BOMB.encode(), "values with its aliases written out"),
        (b"#" * 50_000_000, "50,000,000 bytes"),
    ],
    ids=["another encoding", "a bomb of aliases", "a large file"],
)
def test_a_hostile_systems_file_is_refused(suite, content, text):
    (suite.folder / "systems.yaml").write_bytes(content)
    suite.write(IMPORTED)
    assert_refused(suite, suite.run(), text)
    assert not (suite.folder / "imported").exists()


@pytest.mark.servers
def test_workers_list_all_mistakes_and_start_nothing(suite):
    mistakes = REFUSALS["all mistakes of all tests"]
    suite.write(mistakes["tests"])
    assert_refused(suite, suite.run_workers(), *mistakes["printed"])


def test_a_damaged_baseline_file_is_named_and_left_as_it_is(suite):
    suite.write(ONE_JOB)
    (suite.folder / "baselines").mkdir()
    damaged = suite.file("baselines/local.yaml", "schema: 1\nsystem: local\nentries: [\n")
    assert_refused(suite, suite.run(), "local.yaml:")
    assert damaged.read_text() == "schema: 1\nsystem: local\nentries: [\n"


@pytest.mark.parametrize("name", ["", "../../x", "$(touch pwned)", "a;b", "'\\\"", "ünïcode"])
def test_odd_names_do_no_harm(suite, name):
    suite.write(f"""
    @job(name="{name}")
    def test_it(run, baseline): assert run >= baseline
    """)
    suite.run().assert_outcomes(passed=1)
    suite.run().assert_outcomes(passed=1)
    assert not list(suite.folder.rglob("pwned"))
    assert not (suite.state.parent / "x").exists()


def test_options_of_another_scheduler_are_ignored_where_it_is_not(suite):
    suite.write(KUBERNETES)
    assert suite.run().ret == 0
    (record,) = suite.records()
    assert "kubernetes" not in record["asked"]
