"""Ranks that a batch on the real Slurm forks where the partition says `warm: true`: they find what fresh ones find, and nothing is left."""

import json
import os
import signal
from pathlib import Path

import pytest
from nosy_runs import is_alive, nosy, pair
from running_suites import text_of
from services import Slurm
from slurm_batches import submit

pytestmark = pytest.mark.servers

SUITE = text_of(__file__, "../warm_ranks.py.txt")
LIMIT_S = 1200.0

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
    batch = submit(slurm, folder, *runs, pair("pair"), options=("--nodes=1", "--exclusive"))
    try:
        assert batch.await_end() == 0, batch.log("fresh")
    finally:
        slurm.run("scancel", batch.job)
    files = {name: Path("facts.json") for name in RUNS} | {
        f"pair {rank}": Path(f"facts{rank}.json") for rank in (0, 1)
    }
    return {name: json.loads((folder / name.split()[0] / file).read_text()) for name, file in files.items()}


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


def test_no_warm_process_is_left_of_a_job(facts):
    assert not [one["warm"] for one in facts.values() if one["warm"] is not None and is_alive(one["warm"])]


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_trainings_that_share_a_job_are_forked_where_the_partition_says_so(suite, warm):
    suite.tests(SUITE)
    file = suite.folder / "systems.yaml"
    systems = json.loads(file.read_text())
    (part,) = systems["systems"]["cluster"]["partitions"].values()
    part.update(launcher="auto", **({"warm": True} if warm else {}))
    file.write_text(json.dumps(systems))
    result = suite.start("--mlhpc-pack", *(() if warm else ("-k", "before"))).end(LIMIT_S)
    result.expect(0, passed=5 if warm else 2)
    ranks = [one["measurement"]["environment"] for one in result.records if "training" in one["benchmark"]]
    interpreters = [environment["interpreter"] for environment in ranks]
    assert interpreters == ["fresh", "fresh"] or (interpreters[:2], interpreters[-1]) == (
        ["warm", "warm"],
        "warm",
    )
    assert ("warm" in interpreters) is warm
