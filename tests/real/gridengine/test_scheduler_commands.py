"""Sessions on a real Grid Engine by its definition, as a user runs them; each failure with the scheduler's own words."""

import json
import os
import shutil
from pathlib import Path

import pytest
from grid_suites import Suite
from running_suites import wait_for

from pytest_mlhpc.provision.scheduler.definition import SHIPPED

pytestmark = pytest.mark.servers

TWO_RANKS = """\
@script("echo rank $RANK of $WORLD_SIZE on $(uname -n); echo rate: 4", nodes=2, ranks_per_node=1)
def test_ranks(run):
    words = {line.split()[1]: line.split()[-1] for line in run.output.splitlines() if line.startswith("rank ")}
    assert sorted(words) == ["0", "1"] and sorted(words.values()) == ["node1", "node2"]
"""

TRAINING = """\
@train("cosmoflow", nodes=2, global_batch=2, steps=2, warmup=1, judge=False)
def test_training(run):
    assert run["loss"].last > 0
"""

ONE = """\
@script("uname -n; echo job $JOB_ID; echo rate: 4")
def test_one(run):
    assert run["rate"].value == 4
"""


def instead_of(command: str, folder: Path, script: str) -> dict[str, str]:
    """Return variables by which *script* runs instead of a command, which it finds as ``$REAL``."""
    folder.mkdir()
    path = folder / command
    path.write_text(f"#!/bin/sh\nREAL={shutil.which(command)}\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_program_two_ranks_on_two_hosts_and_a_training_over_both_are_measured(suite):
    suite.tests(ONE + TWO_RANKS + TRAINING)
    found = suite.run("--mlhpc-pack")
    found.expect(0, passed=3)
    assert {len(record["nodes"]) for record in found.records} == {1, 2}
    assert all(record["job_id"].isdigit() for record in found.records)
    assert suite.ledgers() == []


def test_the_hosts_are_vetted_before_ranks_run_on_them(suite):
    suite.partition(vet={"level": "quick", "unknown": "warn"})
    suite.tests(TWO_RANKS + ONE.replace('rate: 4")', 'rate: 4", ranks_per_node=1)'))
    found = suite.run()
    found.expect(0, passed=2)
    assert all(record["vetting"] for record in found.records)


def test_a_job_that_is_deleted_from_outside_says_so(suite, gridengine):
    session = suite.begin_gated("outside")
    session.until("the id in the ledger", suite.job_ids)
    (job,) = suite.job_ids()
    assert gridengine.run("qdel", job).returncode == 0
    found = session.end()
    found.expect(1, "cancelled_outside", f"Grid Engine job {job} CANCELLED", error=1)
    assert suite.ledgers() == []


def test_ctrl_c_deletes_the_job(suite, gridengine):
    session = suite.begin_gated("interrupted")
    session.until("the id in the ledger", suite.job_ids)
    (job,) = suite.job_ids()
    session.signal(2)
    assert session.end().code == 2
    assert job not in gridengine.jobs()
    assert suite.ledgers() == []


def test_reap_ends_the_job_of_a_session_that_was_killed(suite, gridengine):
    session = suite.begin_gated("killed")
    session.until("the id in the ledger", suite.job_ids)
    (job,) = suite.job_ids()
    session.kill()
    assert job in gridengine.jobs()
    assert f"cancelled job {job}" in suite.reap()
    wait_for(lambda: job not in gridengine.jobs())
    assert suite.ledgers() == []


def test_a_later_session_adopts_the_job_of_one_that_detached(suite):
    suite.gated("later")
    suite.run("--mlhpc-wait=0").expect(75, "a later session")
    (job,) = suite.job_ids()
    suite.go()
    found = suite.run("--mlhpc-resume")
    found.expect(0, passed=1)
    assert [record["job_id"] for record in found.records] == [job]
    assert suite.ledgers() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": {"queue": "nosuch.q"}}, 'job requests unknown queue "nosuch.q"'),
        ({"arguments": [["-l", "nosuch=1"]]}, 'unknown resource "nosuch"'),
        ({"values": {"slots": 3}}, "no suitable queues"),
    ],
)
def test_a_refused_job_is_an_error_in_grid_engines_own_words(suite, changes, words):
    suite.partition(commands={"definition": "gridengine", **changes})
    suite.tests(ONE)
    suite.run().expect(1, "rejected", "Grid Engine refused the job", words, error=1)
    assert suite.ledgers() == []


def test_a_submission_whose_answer_is_lost_is_found_by_its_name(suite, tmp_path, gridengine):
    suite.gated("lost")
    log = tmp_path / "qsub.log"
    script = f'"$REAL" "$@" >> {log}\necho "error: commlib error: got select error" >&2; exit 1'
    session = suite.start(environment=instead_of("qsub", tmp_path / "bin", script))
    session.begun("lost")
    (job,) = session.until("the answer of qsub", lambda: log.read_text().split())  # its job may begin before
    suite.go()
    found = session.end()
    found.expect(0, passed=1)
    assert [record["job_id"] for record in found.records] == [job]
    assert job not in gridengine.jobs()


def test_a_job_beyond_its_time_limit_says_so(suite):
    suite.partition(commands={"definition": "gridengine", "arguments": [["-l", "h_rt=8"]]})
    suite.gated("long")
    suite.run().expect(1, "the allocation reached its time limit", failed=1)
    assert suite.ledgers() == []


def own_definition(suite: Suite, old: str, new: str) -> None:
    """Let the partition have a definition of its own, which differs by this from the one that is shipped."""
    text = (SHIPPED / "gridengine.yaml").read_text(encoding="utf-8")
    assert old in text
    (suite.folder / "mine.yaml").write_text(text.replace(old, new), encoding="utf-8")
    suite.partition(commands={"definition": "./mine.yaml"})


def test_words_that_start_no_agent_are_named_with_their_last_lines(suite):
    own_definition(
        suite,
        '[qrsh, -inherit, -nostdin, -noshell, "{host}"]',
        '[sh, -c, "echo no agent here; exit 9", "{host}"]',
    )
    suite.tests(TWO_RANKS)
    suite.run().expect(
        1, "launch_failed", "it ended with exit code 9; its last lines: no agent here", error=1
    )
    assert suite.ledgers() == []


def test_a_pattern_of_hosts_that_matches_nothing_shows_the_file(suite):
    own_definition(suite, r"'^(?P<host>\S+)\s'", "'^host=(?P<host>.*)'")
    suite.tests(TWO_RANKS)
    suite.run().expect(
        1, "the nodes of this allocation are not known", "matches nothing in", "all.q@node1", error=1
    )
    assert suite.ledgers() == []


def test_a_pattern_of_the_id_that_matches_nothing_costs_no_job_as_the_name_finds_it(suite):
    own_definition(suite, r"'(?m)^(?P<id>\d+)'", r"'Your job (?P<id>\d+) has been submitted'")
    suite.tests(ONE)
    suite.run().expect(0, passed=1)
    assert suite.ledgers() == []


def test_a_missing_command_is_said_before_anything_is_submitted(suite):
    own_definition(suite, "[qsub, -terse", "[qsub-of-another-cell, -terse")
    suite.tests(ONE)
    suite.run().expect(4, "runs qsub-of-another-cell, not found on PATH", "nothing was submitted")


def test_a_host_that_dies_ends_the_run_of_its_ranks_and_is_named(own_gridengine, make_suite):
    """The session would make the run once more when both hosts are back."""
    suite = make_suite(own_gridengine)
    text = '@script("touch {folder}/begun-$RANK; exec sleep 600", nodes=2, ranks_per_node=1)\ndef test_it(run): pass\n'
    suite.tests(text.replace("{folder}", str(suite.folder)))
    session = suite.start()
    session.until("both ranks", lambda: all((suite.folder / f"begun-{rank}").exists() for rank in (0, 1)))
    (up,) = suite.state.glob("runs/*/lines/*.up")
    second = json.loads(up.read_text())["nodes"][1]
    own_gridengine.service.kill(second)
    lines = up.with_suffix(".jsonl")
    session.until("failure of the node", lambda: '"outcome":"node_failure"' in lines.read_text())
    assert f'"nodes":["{second}"]' in lines.read_text()
    session.signal(2)
    assert session.end().code == 2
    own_gridengine.service.start()
    # Its next job may be on its way to the dead host: the master hears nothing of its end before that is back.
    wait_for(lambda: suite.reap(code=None) and suite.ledgers() == [])
    suite.ended_alone()
