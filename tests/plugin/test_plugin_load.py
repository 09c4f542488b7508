from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "kubernetes", "influxdb_client", "numpy", "pydantic", "rich", "pyslurm", "yaml")

PROBE = f"""
import sys, pytest

pytestmark = pytest.mark.servers  # each test is a pytest of its own
code = pytest.main(sys.argv[1:])
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
sys.exit(code)
"""


def loaded(pytester: pytest.Pytester, *arguments: str) -> str:
    result = pytester.run(
        sys.executable, "-c", PROBE, "-p", "no:hypothesispytest", "-p", "no:randomly", *arguments
    )  # both import more
    return next(line for line in result.outlines if line.startswith("LOADED"))


def test_asking_for_the_version_imports_nothing_heavy(pytester):
    assert loaded(pytester, "--version") == "LOADED []"


def test_an_ordinary_run_imports_nothing_heavy(pytester):
    pytester.makepyfile("def test_it(): pass")
    assert loaded(pytester) == "LOADED []"


def test_the_plugin_itself_imports_none_of_its_own_machinery(pytester):
    code = "import sys, pytest_mlhpc.plugin; print([m for m in sys.modules if m.startswith('pytest_mlhpc')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "session" not in found
    assert "judge" not in found


def test_without_system_marked_tests_are_skipped_and_others_run(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.parametrize("devices", [1, 2])
    def test_marked(run): raise SystemError
    def test_plain(): pass
    """)
    result = suite.run(system="", n=workers)
    result.assert_outcomes(passed=1, skipped=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*SKIPPED*to run it, pass --system NAME*"])
    result.stdout.no_fnmatch_line("*mlhpc: running on*")
    assert suite.nothing_was_written()


def test_without_system_a_misspelt_field_is_refused_as_pytest_always_does(suite):
    suite.write("""
    @job()
    @pytest.mark.parametrize("devicez", [1])
    def test_marked(run): pass
    """)
    result = suite.run(system="")
    result.stdout.fnmatch_lines(["*uses no argument 'devicez'*"])
    assert result.ret == 2


def test_markers_and_options_are_documented(suite):
    suite.run("--markers", system="").stdout.fnmatch_lines(
        ["@pytest.mark.train(workload, [*][*]spec)*", "@pytest.mark.job(workload, [*][*]spec)*"]
    )
    suite.run("--help", system="").stdout.fnmatch_lines(["*--system=NAME*", "*--infra-exit-code=CODE*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-jobs", "0"], "expected a number from 1"),
        (["--max-reruns", "-1"], "expected a number from 0"),
        (["--infra-exit-code", "x"], "expected a whole number, found 'x'"),
    ],
)
def test_an_impossible_option_is_a_usage_error(suite, arguments, text):
    suite.write("def test_plain(): pass")
    result = suite.run(*arguments)
    assert result.ret == 4
    assert text in result.stderr.str()


def test_ini_values_stand_in_for_options(suite):
    suite.write("""
    @job()
    def test_it(run): assert run["rate"].value == 4
    """)
    suite.pytester.makeini("[pytest]\nmlhpc_system = local\nmlhpc_state_dir = here\nmlhpc_max_jobs = 2\n")
    result = suite.run(system="")
    result.assert_outcomes(passed=1)
    assert (suite.pytester.path / "here" / "records").is_dir()
    suite.pytester.makeini("[pytest]\nmlhpc_system = local\nmlhpc_max_jobs = many\n")
    result = suite.run(system="")
    assert result.ret == 4
    assert "mlhpc_max_jobs: expected a whole number, found 'many'" in result.stderr.str()
