"""Nights that a drill draws from history after one that was measured: judged as real ones, the same for the same seed."""

from dataclasses import replace

import pytest
from nights_of import nights, quiet, store
from worlds import measurement

from pytest_mlhpc.alert.drill import LaterNights, copy_state, drill_folder, left
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.store.record import JudgedBy
from pytest_mlhpc.store.store import read_records

TERMS = JudgedBy(entries={}, since_ns={"rate": 0}, default_branch="main", mode="record", local=False, nightly=True,
                 series=1, reruns_allowed=4, reruns_broken=0)  # fmt: skip


@pytest.fixture
def site(state_dir):
    """Return what stores forty nights and a last one at a level, and makes nights after it: (records, made by night)."""

    def make(level, count=3, earlier=40):
        *history, tonight = nights([*quiet(earlier), level])
        tonight = replace(tonight, judged_by=TERMS)
        store(state_dir, history)
        source = LocalSource(state_dir)
        later = LaterNights(source, "main")
        source.close()
        store(state_dir, [tonight], "s2")
        source = LocalSource(state_dir)
        made = [later.make([tonight], number, state_dir, source) for number in range(2, 2 + count)]
        source.close()
        return tonight, made

    return make


def test_nights_after_a_large_loss_fail_and_are_stored(site, state_dir):
    _, made = site(60.0)
    firsts = [records[0] for records in made]
    assert [one.verdict for one in firsts] == ["regressed"] * 3
    assert all(58 < metric.value < 62 for one in firsts for metric in one.measurement.metrics)
    assert {one.id for records in made for one in records} <= {one.id for one in read_records(state_dir)}


def test_nights_that_seem_slow_get_the_re_runs_that_the_judge_asks_for(site):
    _, made = site(98.6, count=10)
    attempts = {tuple(one.attempt for one in records) for records in made}
    assert attempts == {(0,), (0, 1, 2, 3, 4)}


def test_nights_at_the_usual_level_pass(site):
    _, made = site(100.0)
    assert not {records[0].verdict for records in made} & {"regressed", "drifted"}


def figures(made):
    return [metric.value for records in made for one in records[:1] for metric in one.measurement.metrics]


class _Only:
    """The history before a moment."""

    def __init__(self, source, until_ns):
        self._source, self._until_ns = source, until_ns

    def series(self):
        return self._source.series(0, self._until_ns)


def test_the_same_history_gives_the_same_nights(site, state_dir, tmp_path):
    tonight, made = site(97.0)
    source = LocalSource(state_dir)
    later = LaterNights(_Only(source, tonight.created_ns), "main")
    again = [later.make([tonight], number, tmp_path / "again", source) for number in (2, 3, 4)]
    source.close()
    assert figures(again) == figures(made)


def test_a_young_series_has_no_later_nights_but_what_broke_breaks_again(site, state_dir):
    tonight, made = site(60.0, earlier=10)
    assert made == [[], [], []]
    broken = replace(tonight, measurement=None, verdict="no_result", judged_by=None)
    source = LocalSource(state_dir)
    later = LaterNights(source, "main").make([broken], 2, state_dir, source)
    source.close()
    assert [one.verdict for one in later] == ["no_result"]


def test_only_nights_of_the_system_are_copied_and_without_samples(state_dir, tmp_path):
    mine = nights(quiet(3), measurement=measurement(100.0, step_times_s=(0.1, 0.2)))
    store(state_dir, [*mine, *nights(quiet(2), system="other"), replace(mine[0], id="m", purpose="manual")])
    assert copy_state(state_dir, tmp_path / "copy", "cirrus", "main") == 3
    copied = list(read_records(tmp_path / "copy"))
    assert {(one.system, one.measurement.step_times_s) for one in copied} == {("cirrus", ())}


def test_a_folder_is_left_only_once_nobody_holds_its_lock(state_dir):
    with drill_folder(state_dir, []) as folder:
        assert left(state_dir) == []
        folder.state("one", None)
    assert not state_dir.exists()
