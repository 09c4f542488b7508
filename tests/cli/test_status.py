"""``mlhpc status`` after a night: all systems together, what did not run and why, what is missing, what it cost."""

import time

import pytest
from nights_of import DAY, HOUR, nights, quiet, store

Out = pytest.CaptureFixture[str]


def of_test(name, count=3, **changes):
    """Some nights of one test; the last one an hour ago unless said otherwise."""
    return nights(quiet(count), node_id=f"suites/t.py::{name}", benchmark=name, **changes)


@pytest.fixture
def last(mlhpc):
    """Return what prints the last night, as lines."""
    return lambda *options: mlhpc("status", *options).out.splitlines()


def test_a_night_is_told_of_all_systems_with_a_command_for_each_problem(state_dir, last):
    now_ns = time.time_ns()
    store(state_dir, [
        *of_test("good", node_hours=0.5), *of_test("other", system="archer2", last_ns=now_ns - 6 * HOUR),
        *of_test("slow", verdict="regressed", explanation=("rate: 15% worse",), node_hours=0.25),
        *of_test("queued", verdict="never_scheduled", failure="never_scheduled: Priority", measurement=None),
        *of_test("gone", last_ns=now_ns - 2 * DAY),
    ])  # fmt: skip
    lines = last()
    assert lines[0].startswith("night of ")
    assert lines[0].endswith(", archer2, cirrus: 2 ok, 1 regressed, 1 not run, 1 stale; 0.75 node-hours")
    assert lines[1] == "regressed: suites/t.py::slow: rate: 15% worse"
    assert lines[2] == "  next: pytest suites/t.py::slow --system cirrus:standard --mlhpc-environment default"
    assert lines[3] == "not run: suites/t.py::queued: never_scheduled: Priority"
    assert lines[5].startswith("stale: suites/t.py::gone: nothing recorded since ")
    assert lines[6] == "  next: pytest suites/t.py::gone --system cirrus:standard"
    assert len(lines) == 7


def test_where_a_system_is_silent_its_tests_are_one_problem(state_dir, last):
    old_ns = time.time_ns() - 3 * DAY
    silent = [*of_test("a", last_ns=old_ns), *of_test("b", last_ns=old_ns)]
    store(state_dir, [*silent, *of_test("c", system="x")])
    night, problem, command = last()
    assert ": 1 ok, 2 stale" in night
    assert problem.startswith("stale: 2 tests of cirrus:standard: nothing recorded since ")
    assert command == "  next: pytest suites/t.py --system cirrus:standard"


def test_the_night_is_shown_although_somebody_measured_since_if_asked(state_dir, last):
    store(state_dir, of_test("nightly"))
    mine = of_test("mine", 1, purpose="manual", last_ns=time.time_ns(), session="mine")
    store(state_dir, mine, session="s2")
    (session,) = last()
    assert session.endswith(": 1 passed")
    (night,) = last("--night")
    assert night.startswith("night of ")


def test_a_night_that_never_was_is_said_so(state_dir, mlhpc):
    store(state_dir, of_test("mine", purpose="manual"))
    assert "no nightly run is recorded" in mlhpc("status", "--night").out


def test_a_night_of_a_wrong_clock_does_not_stay_the_last_for_years(state_dir, last):
    store(state_dir, [*of_test("good"), *of_test("ahead", 1, last_ns=time.time_ns() + 900 * DAY)])
    (line,) = last()
    assert line.endswith(": 1 ok")
