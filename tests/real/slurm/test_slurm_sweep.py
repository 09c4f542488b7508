"""Sweeps, overrides and maintenance, end to end on a real Slurm of this test's own, whose nodes it may drain and reserve."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from faults import XDIST
from running_suites import text_of

pytestmark = pytest.mark.servers


NIGHTLY = {"MLHPC_PURPOSE": "nightly"}

ONE = """\
@script("echo rate: 7", time_limit=600)
def test_one(run):
    pass
"""


@pytest.fixture
def own(own_slurm, make_suite):
    """A suite on a cluster that may be broken."""
    return make_suite(own_slurm)


def reserve(slurm, name: str, start: str, nodes: str = "node[1-4]", flags: str = "maint,ignore_jobs") -> None:
    done = slurm.run(
        "scontrol", "create", "reservation", f"reservationname={name}", f"starttime={start}", "duration=60",
        f"nodes={nodes}", "users=root", f"flags={flags}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def drain(slurm, node: str, reason: str) -> None:
    done = slurm.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
    assert done.returncode == 0, done.stderr


def sweep_file(text: str) -> dict[str, Any]:
    (path,) = re.findall(r"the same for programs: (\S+)", text)
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_each_node_is_measured_once_in_one_allocation_and_the_slow_one_is_named(own):
    own.tests(text_of(__file__, "slow_node2.py.txt"))
    result = own.run("--mlhpc-each-node=all", "--mlhpc-pack")
    result.expect(
        0,
        "running on each of 4 nodes of cluster:part",
        "test_rate[cluster:part-node2]",
        "node2 80 -20.0% rate: worse",
        "rate: median 100 items/s, bound 3.0%",
        "test_two_nodes[cluster:part]: --mlhpc-each-node runs tests of one node, 2 asked",
        passed=8,
    )
    assert sorted(job.nodes for job in own.jobs()) == ["node1", "node2", "node3", "node4"]
    assert {record["node_id"].split("-")[-1].rstrip("]"): record["nodes"] for record in result.records} == {
        f"node{number}": [f"node{number}"] for number in (1, 2, 3, 4)
    }
    assert len({record["benchmark"] for record in result.records}) == 2  # the node is no part of the series
    (rate,) = sweep_file(result.text)["tests"][0]["metrics"]
    assert (rate["nodes"][0]["node"], rate["nodes"][0]["mark"]) == ("node2", "worse")


def test_a_drained_node_is_listed_with_slurms_reason_and_workers_of_xdist_see_the_same(own):
    drain(own.slurm, "node3", "bad memory in slot 4")
    own.tests(ONE)
    result = own.run("--mlhpc-each-node", *XDIST)
    result.expect(0, "node3 (cluster:part): idle+drain: bad memory in slot 4", passed=3)
    assert [one["node"] for one in sweep_file(result.text)["not_measured"]] == ["node3"]


def test_a_node_whose_job_never_starts_ends_as_not_measured(own):
    own.partition(pending_limit="4s", sbatch=["--hold"])
    own.tests(ONE)
    result = own.run("--mlhpc-each-node=node1", "-o", "mlhpc_infra_exit_code=75")
    result.expect(75, "nodes not measured:", "node1 (cluster:part): test_one: never_scheduled", error=1)


def test_no_node_at_all_is_the_machines_matter(own):
    for number in (1, 2, 3, 4):
        drain(own.slurm, f"node{number}", "rack off")
    own.tests(ONE)
    result = own.run("--mlhpc-each-node=idle", "-o", "mlhpc_infra_exit_code=75")
    result.expect(
        75, "infra: --mlhpc-each-node=idle: no node can be measured now: node1: idle+drain: rack off"
    )
    assert own.jobs() == []


def test_a_maintenance_that_begins_before_the_longest_job_ends_submits_nothing(own):
    reserve(own.slurm, "maint42", "now+1minutes")
    own.tests(ONE)
    result = own.run("-o", "mlhpc_infra_exit_code=75")
    result.expect(75, "infra: maintenance until", "(reservation maint42)", "nothing was submitted")
    assert own.jobs() == []
    with_workers = own.run("-o", "mlhpc_infra_exit_code=75", *XDIST)
    with_workers.expect(75, "(reservation maint42)")
    assert own.jobs() == []
    listed = own.mlhpc("alert", "list")
    assert (
        listed.count("reservation maint42") == 1
    )  # both sessions recorded the same one, for the morning page


def test_within_the_maintenance_s_own_reservation_jobs_run_and_the_record_says_so(own):
    reserve(own.slurm, "maint42", "now")
    own.tests(ONE)
    result = own.run("--mlhpc-set", "slurm.reservation=maint42", environment=NIGHTLY)
    result.expect(0, "set slurm.reservation=maint42", passed=1)
    (record,) = result.records
    assert record["overrides"] == {"slurm.reservation": "maint42"}
    assert record["purpose"] == "nightly"  # it feeds the judge: a reservation changes no figure
    refused = own.run("--mlhpc-set", "slurm.exclusive=true", "--mlhpc-baseline=update")
    refused.expect(4, "--mlhpc-baseline=update with --mlhpc-set slurm.exclusive: figures of other options")


def test_a_sweep_of_a_reservation_goes_into_it(own):
    reserve(own.slurm, "maint42", "now", nodes="node[2-3]")
    own.tests(ONE)
    result = own.run("--mlhpc-each-node=maint42", environment=NIGHTLY)
    assert {record["purpose"] for record in result.records} == {"manual"}  # no sweep feeds the judge
    result.expect(0, "running on each of 2 nodes of cluster:part; set slurm.reservation=maint42", passed=2)
    assert sorted(job.nodes for job in own.jobs()) == ["node2", "node3"]
