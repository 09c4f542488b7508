"""Ranks that a batch on the real Slurm forks where the partition says `warm: true`: they find what fresh ones find, and nothing is left."""

import contextlib
import json
from pathlib import Path

import pytest
from nosy_runs import nosy, pair
from pods import bash
from running_suites import wait_for
from services import Slurm
from slurm_batches import submit

from pytest_mlhpc.node.batch import warm

pytestmark = pytest.mark.servers

LIMIT_S = 1200.0
TRAININGS = """
@pytest.mark.parametrize("turn", [1, 2])
@train("cosmoflow", time_limit=600)
def test_training(run, turn):
    pass
"""

#: Runs of one job: what their ranks do, and whether they may be forked.
RUNS = {
    "fresh": ((), False),
    "first": (("mess",), True),
    "second": ((), True),
    "deadly": (("end_the_warm_process",), True),
    "next": ((), True),
    "last": ((), True),
}


@pytest.fixture(scope="module")
def facts(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What ranks found in one job of one node."""
    folder = tmp_path_factory.mktemp("warm")
    runs = [nosy(name, acts, may=may) for name, (acts, may) in RUNS.items()]
    options = ("--nodes=1", "--exclusive", f"--chdir={folder}")
    waits = bash(f"while [ ! -e {folder}/go ]; do sleep 0.1; done", "waits")
    batch = submit(slurm, folder, *runs, pair("pair"), waits, options=options)
    try:
        batch.await_line("pair", "end")
        assert len(warm_processes(folder)) == 1
        (folder / "go").touch()
        assert batch.await_end() == 0, batch.log("fresh")
    finally:
        slurm.run("scancel", batch.job)
    wait_for(lambda: not warm_processes(folder))
    files = {name: Path("facts.json") for name in RUNS} | {
        f"pair {rank}": Path(f"facts{rank}.json") for rank in (0, 1)
    }
    return {name: json.loads((folder / name.split()[0] / file).read_text()) for name, file in files.items()}


def warm_processes(folder: Path) -> list[str]:
    """Return the pids of processes that fork ranks for a job with *folder* as its working directory."""
    there = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            forks = entry.name.isdigit() and warm.__name__.encode() in (entry / "cmdline").read_bytes()
            if forks and (entry / "cwd").readlink() == folder:
                there.append(entry.name)
    return there


def found(facts: dict[str, dict], name: str) -> dict:
    return {key: fact for key, fact in facts[name].items() if key not in ("drawn", "warm")}


def test_a_forked_rank_finds_what_a_fresh_one_finds_in_the_same_job(facts):
    assert (facts["fresh"]["warm"], bool(facts["first"]["warm"])) == (None, True)
    assert found(facts, "first") == found(facts, "fresh")


def test_the_second_rank_of_a_job_is_forked_by_the_same_process_and_finds_nothing_of_the_first(facts):
    assert facts["second"]["warm"] == facts["first"]["warm"]
    assert found(facts, "second") == found(facts, "fresh")


def test_a_warm_process_that_was_killed_is_made_again(facts):
    assert facts["last"]["warm"] not in (None, facts["first"]["warm"])
    assert found(facts, "last") == found(facts, "fresh")


def test_several_ranks_of_a_run_are_forked_by_one_process(facts):
    assert facts["pair 0"]["warm"] == facts["pair 1"]["warm"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False])
def test_ranks_that_share_a_job_are_forked_where_the_partition_says_so(suite, says):
    suite.tests(TRAININGS)
    file = suite.folder / "systems.yaml"
    systems = json.loads(file.read_text())
    (part,) = systems["systems"]["cluster"]["partitions"].values()
    part.update(launcher="auto", **({"warm": True} if says else {}))
    file.write_text(json.dumps(systems))
    result = suite.start("--mlhpc-pack").end(LIMIT_S)
    result.expect(0, passed=2)
    found = [record["measurement"]["environment"]["interpreter"] for record in result.records]
    assert found == ["warm" if says else "fresh"] * 2
