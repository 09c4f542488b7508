"""Our options beside those of others: everybody's words are left to everybody, and a short form is ours where it is free."""

from pathlib import Path

import pytest
from inner_sessions import CONFTEST, ONE_JOB, output

from pytest_mlhpc import options

#: Words that conftest files and plug-ins use for options of their own.
EVERYDAY = [
    "system",
    "environment",
    "preset",
    "wait",
    "set",
    "history",
    "resume",
    "budget",
    "pack",
    "here",
    "detach",
    "lease",
    "max-jobs",
    "state",
    "baseline",
    "reruns",
    "each-node",
]

TAKES = {
    "the anonymous group": "parser.addoption('--system', action='store', default='theirs')",
    "a group of its own": "parser.getgroup('lab').addoption('--system', action='append')",
    "a name of its own": "parser.getgroup('lab').addoption('--system', dest='lab_system')",
    "a switch": "parser.addoption('--system', action='store_true')",
}

THEIRS = "def test_theirs(request): assert request.config.getoption('--system') == {value!r}\n"


def taking(how: str) -> str:
    return f"def pytest_addoption(parser): {how}\n"


def test_twelve_options_at_most_each_with_our_name_and_on_the_page():
    parser = pytest.Parser(_ispytest=True)
    options.add(parser)
    names = [name for group in parser._groups for option in group.options for name in option.names()]
    assert len(names) <= 12
    assert all(name.startswith("--mlhpc-") for name in names)
    page = (Path(__file__).parents[2] / "docs/writing-benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in (*names, *parser._inidict) if f"`{name}" not in page] == []


def test_a_project_may_define_options_of_everyday_names(suite):
    lines = "; ".join(f"parser.addoption('--{word}')" for word in EVERYDAY)
    suite.file("conftest.py", taking(lines))
    suite.file("test_suite.py", THEIRS.format(value="x"))
    suite.run("--system", "x", *(f"--{word}=x" for word in EVERYDAY[1:]), system="").expect(0, passed=1)


@pytest.mark.parametrize("how", TAKES)
def test_a_system_of_others_stays_theirs_and_ours_has_its_long_name(suite, how):
    suite.write(ONE_JOB)
    suite.file("conftest.py", CONFTEST + taking(TAKES[how]))
    words = () if how == "a switch" else ("x",)
    suite.run("--system", *words, system="").expect(0, skipped=1)
    suite.run("--system", *words, "--mlhpc-system=local", system="").expect(0, passed=1)


@pytest.mark.servers
def test_a_system_of_a_plugin_stays_theirs_with_workers_too(suite):
    suite.write(ONE_JOB)
    suite.file("lab.py", taking(TAKES["a group of its own"]))
    suite.run_workers("-p", "lab", "--system=x", "--mlhpc-system=local", system="").expect(0, passed=1)


def test_a_conftest_that_is_found_late_may_define_an_option_that_nobody_gave(suite):
    (suite.folder / "below").mkdir()
    suite.file("below/conftest.py", taking(TAKES["a group of its own"]))
    suite.file("below/test_plain.py", "def test_plain(): pass\n")
    suite.run(system="").expect(0, passed=1)


def test_the_name_of_a_system_is_no_path_of_tests(suite):
    """Else pytest would not look into its own ``testpaths``, where conftest files may serve schedulers."""
    (suite.folder / "suites").mkdir()
    (suite.folder / "conftest.py").rename(suite.folder / "suites/conftest.py")
    suite.file("pytest.ini", "[pytest]\ntestpaths = suites\n")
    suite.write("@job(judge=False)\ndef test_it(run): pass\n", "suites/test_suite.py")
    suite.run("--system", "site", system="").expect(0, passed=1)


def test_help_names_the_short_form(suite):
    assert "short: --system" in " ".join(output(suite.run("--help", system="")).split())
