"""The one line about what waits to be accepted, or was written."""

from dataclasses import replace

import pytest

from pytest_mlhpc.judge.baselines import BaselineStanding, recorded_line, standings_of, written_line
from pytest_mlhpc.store.record import Judgement, MetricVerdict, Verdict

NEW, CHANGED, PROVISIONAL, SETTLED, WRONG, WRITTEN, AGREES = BaselineStanding
STEPS = "steps 100 -> 200"
ACCEPT = "mlhpc baseline accept"


def judgement(**verdicts):
    metrics = [MetricVerdict(name, 1.0, "s", "lower", None, None, 0.1, one) for name, one in verdicts.items()]
    return Judgement(list(verdicts.values())[-1], tuple(metrics))


@pytest.mark.parametrize(
    ("verdicts", "update", "standings"),
    [
        ({"a": Verdict.PASSED, "b": Verdict.PASSED, "c": Verdict.NEW}, False, [AGREES, PROVISIONAL, NEW]),
        ({"a": Verdict.PASSED, "c": Verdict.NEW}, True, [AGREES, WRITTEN]),
        ({"a": Verdict.WRONG_BASELINE, "b": Verdict.PASSED}, False, [WRONG, PROVISIONAL]),
        ({"c": Verdict.NEW, "a": Verdict.REGRESSED}, False, []),
    ],
    ids=["recorded", "updated", "a baseline is wrong", "nothing of a run that failed waits"],
)
def test_a_run_says_how_its_series_stand(verdicts, update, standings):
    found = standings_of("t", judgement(**verdicts), {"a"}, update=update, local=True)
    assert list(found.values()) == standings


def test_what_no_file_has_accepted_is_settled_by_nights_elsewhere_than_on_this_machine():
    assert standings_of("t", judgement(a=Verdict.PASSED), (), update=False) == {("t", "a"): SETTLED}


def test_a_series_of_another_definition_than_before_begins_a_new_epoch():
    changed = replace(judgement(a=Verdict.NEW), epoch=STEPS)
    assert standings_of("t", changed, (), update=False) == {("t", "a"): CHANGED}


@pytest.mark.parametrize(
    ("standings", "apart", "line"),
    [
        ([], False, ""),
        ([AGREES], False, ""),
        ([NEW], False, f"1 new series recorded; to accept: {ACCEPT} t0 --reason TEXT --x"),
        ([NEW], True, "1 new series recorded"),
        (
            [SETTLED],
            False,
            f"1 series judged by the level of their first 8 nights, not in git yet; to accept: {ACCEPT} s1 --reason TEXT --x",
        ),
        (
            [WRONG],
            False,
            f"1 baseline is wrong: a month without a change lies elsewhere; to accept: {ACCEPT} t0 --reason TEXT --x",
        ),
        (
            [WRONG, WRONG],
            False,
            f"2 baselines are wrong: a month without a change lies elsewhere; to accept: {ACCEPT} s1 --reason TEXT --x",
        ),
        (
            [NEW, NEW, PROVISIONAL],
            False,
            (
                "2 new series recorded, 1 series judged by provisional baselines of this machine; "
                f"to accept: {ACCEPT} s1 --reason TEXT --x"
            ),
        ),
    ],
)
def test_what_waits_is_one_line_with_one_command(standings, apart, line):
    found = {(f"t{number}", "a"): one for number, one in enumerate(standings)}
    assert recorded_line(found, {}, "s1", ["--x"], apart=apart) == line


@pytest.mark.parametrize(
    ("epochs", "standings", "line"),
    [
        (
            {"a.py::t0": STEPS},
            [CHANGED],
            f"1 series begins a new epoch, not compared with earlier ones (t0: {STEPS}); to accept: {ACCEPT} a.py::t0 --reason TEXT",
        ),
        (
            {"a.py::t0": STEPS, "a.py::t1": STEPS, "a.py::t2": "nodes 1 -> 2"},
            [CHANGED, CHANGED, CHANGED, NEW],
            (
                "1 new series recorded, 3 series begin a new epoch, not compared with earlier ones "
                f"(2 tests: {STEPS}; t2: nodes 1 -> 2); to accept: {ACCEPT} s1 --reason TEXT"
            ),
        ),
        (
            {f"a.py::t{number}": f"nodes 1 -> {number}" for number in range(2, 7)},
            [CHANGED],
            (
                "1 series begins a new epoch, not compared with earlier ones (t2: nodes 1 -> 2; t3: nodes 1 -> 3; "
                f"t4: nodes 1 -> 4; and 2 more changes); to accept: {ACCEPT} a.py::t0 --reason TEXT"
            ),
        ),
    ],
    ids=["one test", "several tests", "many changes"],
)
def test_new_epochs_are_told_with_what_changed_and_the_command(epochs, standings, line):
    found = {(f"a.py::t{number}", "a"): one for number, one in enumerate(standings)}
    assert recorded_line(found, epochs, "s1", [], apart=False) == line


@pytest.mark.parametrize(
    ("standings", "files", "line"),
    [
        ([WRITTEN], ["b.yaml"], "baselines of 1 series written to b.yaml"),
        (
            [WRITTEN, AGREES],
            ["b.yaml"],
            "baselines of 1 series written to b.yaml; 1 series agree with their baselines, which stay as they are",
        ),
        ([AGREES], [], "no baseline written: 1 series agree with their baselines, which stay as they are"),
        ([], [], "no baseline written: no test gave a figure to accept"),
    ],
)
def test_an_update_says_what_it_wrote_where_or_why_not(standings, files, line):
    found = {(f"t{number}", "a"): one for number, one in enumerate(standings)}
    assert written_line(found, {}, files) == line


def test_an_update_names_the_new_epochs_that_it_accepted():
    line = written_line({("t", "a"): WRITTEN}, {"t": STEPS}, ["b.yaml"])
    assert line == f"baselines of 1 series written to b.yaml; new epochs begin: t: {STEPS}"
