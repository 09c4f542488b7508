"""What a session takes over of earlier ones: each run once, nothing that was recorded, nothing of tests it does not have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.ledger_entry import ledger_entry
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.resume import is_needed_by, resume_entries
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.record import Provenance


@pytest.fixture
def submit(tmp_path):
    """Make the files and the ledger's entry of an allocation for *specs*, submitted at *when*."""

    def make(*specs, when=1):
        plan = plan_of([(spec, 0) for spec in specs], tmp_path / "runs", "")
        Path(plan.directory).mkdir(parents=True)
        plan_file(plan).write_text(json.dumps(to_json(plan)))
        entry = ledger_entry(plan, list(specs), "earlier", provenance=Provenance("nightly", "main", "4f3c"))
        return replace(entry, submitted_ns=when, native_id="7")

    return make


def plan_file(allocation):
    return Path(allocation.directory) / "plan.json"


def recovered(entries, specs, recorded=lambda _run_id: False):
    """Return what a session with tests of *specs* takes over of *entries*."""
    return resume_entries(entries, [Job(spec) for spec in specs], recorded)


def test_runs_become_attempts_of_the_jobs_that_want_them(submit, command):
    specs = [command(0), command(1)]
    entry, jobs = submit(*specs), [Job(spec) for spec in specs]
    assert is_needed_by(jobs)(entry)
    (adopted,) = resume_entries([entry], jobs, lambda _run_id: False).adopted[entry.partition]
    assert ([job for job, _ in adopted.runs.values()], adopted.others) == (jobs, frozenset())
    attempt = next(iter(adopted.runs.values()))[1]
    assert (attempt.adopted, attempt.shared, attempt.job_id, attempt.number) == (True, True, "7", 0)
    assert attempt.made_from == ("nightly", "main", "4f3c")  # not what the session that judges it is


def test_runs_that_no_test_of_this_session_wants_are_named(submit, command):
    entry = submit(command(0), command(1))
    (adopted,) = recovered([entry], [command(1)]).adopted[entry.partition]
    assert adopted.others == {entry.runs[0].run_id}
    assert list(adopted.runs) == [entry.runs[1].run_id]


def test_a_recorded_run_is_not_given_out_again(submit, command):
    entry = submit(command(0), command(1))
    found = recovered([entry], [command(0), command(1)], entry.runs[0].run_id.__eq__)
    (adopted,) = found.adopted[entry.partition]
    assert (list(adopted.runs), adopted.others) == ([entry.runs[1].run_id], frozenset())
    gone = recovered([entry], [command(0)], lambda _run_id: True)
    assert (gone.adopted, gone.unusable[entry.id][1]) == ({}, "no test waits for its results")


def test_of_two_allocations_with_the_same_attempt_the_newest_counts(submit, command):
    older, newer = submit(command(0), when=1), submit(command(0), when=2)
    found = recovered([newer, older], [command(0)])
    (adopted,) = found.adopted[newer.partition]
    assert adopted.plan.allocation_id == newer.id
    assert list(found.unusable) == [older.id]


def test_a_note_to_leave_a_run_out_is_taken_back(submit, command):
    entry = submit(command(0))
    note = Path(entry.directory) / f"{entry.runs[0].run_id}.skip"
    note.touch()
    recovered([entry], [command(0)])
    assert not note.exists()


def test_a_plan_that_others_could_have_changed_is_not_gone_on_with(submit, command):
    entry = submit(command(0))
    plan_file(entry).chmod(0o666)
    found = recovered([entry], [command(0)])
    assert (found.adopted, found.unusable) == ({}, {})
    assert "everybody may change it" in found.unseen[entry.id]


@pytest.mark.parametrize(
    ("native_id", "ended", "why"),
    [
        pytest.param("7", False, "cannot be read now", id="which may be somewhere else"),
        pytest.param("", True, "ended before anything was submitted", id="which was never submitted"),
    ],
)
def test_a_job_without_a_plan_is_left_alone_or_ended(submit, command, native_id, ended, why):
    entry = replace(submit(command(0)), native_id=native_id)
    plan_file(entry).unlink()
    found = recovered([entry], [command(0)])
    assert (found.adopted, bool(found.unusable), bool(found.unseen)) == ({}, ended, not ended)
    assert why in str(found.unusable or found.unseen)


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"allocation_id": 3}'])
def test_a_plan_that_is_none_ends_the_job(submit, command, content):
    entry = submit(command(0))
    plan_file(entry).write_text(content)
    found = recovered([entry], [command(0)])
    assert (found.adopted, "cannot be used" in found.unusable[entry.id][1]) == ({}, True)


def test_other_parameters_are_another_job(submit, command):
    entry = submit(command(0))
    assert not [
        other for other in (command(0, time_limit=17.0), command(1)) if is_needed_by([Job(other)])(entry)
    ]
