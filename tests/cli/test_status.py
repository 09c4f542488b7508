"""``mlhpc status`` after a night: all systems together, what did not run and why, what is missing, what it cost."""

import sys
import time

import pytest
from nights_of import DAY, HOUR, nights, quiet, store


def of_test(name, count=3, **changes):
    """Some nights of one test; the last one an hour ago unless said otherwise."""
    return nights(quiet(count), node_id=f"suites/t.py::{name}", benchmark=name, **changes)


@pytest.fixture
def last(mlhpc):
    """Return what prints the last night, as lines."""
    return lambda *options: mlhpc("status", *options).out.splitlines()


def test_a_night_of_all_systems_is_reported_by_cause(state_dir, last):
    now_ns = time.time_ns()
    store(state_dir, [
        *of_test("good", node_hours=0.5), *of_test("other", system="archer2", last_ns=now_ns - 6 * HOUR),
        *of_test("slow", verdict="below_reference", failure="below_reference: rate: 15% worse", node_hours=0.25),
        *of_test("queued", verdict="never_scheduled", failure="never_scheduled: Priority", measurement=None),
        *of_test("gone", last_ns=now_ns - HOUR - 2 * DAY),
    ])  # fmt: skip
    head, slow, why, command, queued, gone = last()
    assert head.startswith("night of ")
    assert head.endswith(
        f": 3 of 5 measured, 2 systems, 0.75 node-hours, history of 5 nights from {state_dir}"
    )
    assert slow.startswith("slow: worse than its reference since ")
    assert (why, command) == ("  rate: 15% worse", "  next: mlhpc history slow --system cirrus")
    assert queued == "did not run for 3 nights: queued: never_scheduled: Priority"
    assert gone.startswith("not recorded: gone since ")


def test_where_a_system_is_silent_its_tests_are_one_problem(state_dir, last):
    old_ns = time.time_ns() - 3 * DAY
    silent = [*of_test("a", last_ns=old_ns), *of_test("b", last_ns=old_ns)]
    store(state_dir, [*silent, *of_test("c", system="x")])
    night, problem = last()
    assert ": 1 of 3 measured, 2 systems, " in night
    assert problem.startswith("not recorded: 2 tests of cirrus:standard since ")


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
    night, clock = last()
    assert ": 1 of 1 measured, " in night
    assert clock.startswith("a clock is wrong: 1 record of cirrus left out, dated up to ")


def test_a_run_that_is_still_queued_is_not_measured(state_dir, last):
    queued = {"verdict": "detached", "failure": "detached: still queued", "measurement": None}
    store(state_dir, [*of_test("good"), *of_test("queued", 1, **queued)])
    head, line = last()
    assert ": 1 of 2 measured, " in head
    assert line == "did not run: queued: detached: still queued"


def test_text_is_cut_at_the_width_of_the_terminal_and_a_command_is_not(state_dir, last, monkeypatch):
    name = f"test_{'x' * 80}"
    store(state_dir, of_test(name, verdict="below_reference", failure=f"below_reference: {'y' * 80}"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    head, what, why, command = last()
    assert [len(line) for line in (head, what, why)] == [40] * 3
    assert command == f"  next: mlhpc history {name} --system cirrus"


def test_nothing_in_names_and_reasons_is_obeyed_by_a_terminal(state_dir, last):
    hostile = "t.py::x\x1b[31m\n\u202e</script>"
    fields = {"verdict": "never_scheduled", "failure": hostile, "node_id": hostile, "measurement": None}
    store(state_dir, nights(quiet(2), benchmark=hostile, system="a\nb", **fields))
    lines = last()
    assert len(lines) == 2
    assert [line for line in lines if not line.isprintable()] == []
