"""Readiness on the real cluster: what one node alone shows is found before its pod starts, all else by the pods together.

Each test node has a folder that only it sees. Mounted where Linux lists NUMA nodes, it makes one node differ from what is
described.
"""

import json
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes_service import Kubernetes
from pod_suites import Suite

BAD, GOOD = "127.0.0.2", "127.0.0.1"
UNFIT = "[node_problem] numa is 2, 1 is described"
NUMA = "/sys/devices/system/node"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

#: Nodes of a test cluster have neither floors nor a history, and containers may not read the kernel's log.
QUICK = {"level": "quick", "unknown": "warn", "budget": "15m"}  # a busy machine does little in the usual time
VET = {**QUICK, "expect": {"numa": "1"}}

ONE = """
@script("echo rate: 4", time_limit=600)
def test_one(run): assert run["rate"].value == 4
"""

#: Two pods that compute together.
BOTH = """
@workload("nbody", nodes=2, bodies=64, steps=2, warmup=1, judge=False, time_limit=600)
def test_both(run): assert run["step_time"].value > 0
"""

#: The scheduler's first choice.
FIRST = {
    "preferredDuringSchedulingIgnoredDuringExecution": [
        {
            "weight": 100,
            "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [BAD]}]},
        }
    ]
}


@pytest.fixture
def numa(kubernetes: Kubernetes) -> Iterator[Callable[..., dict[str, Any]]]:
    """Return a volume by which nodes 1 and 2 have so many NUMA nodes."""
    assert kubernetes.directory is not None, "the nodes' own folders are those of ci/kubernetes"
    name = f"mlhpc-numa-{secrets.token_hex(4)}"
    folders = [kubernetes.directory / f"node{number}/private/lib" / name for number in (1, 2)]

    def make(*counts: int) -> dict[str, Any]:
        for folder, count in zip(folders, counts, strict=True):
            for number in range(count):
                (folder / f"node{number}").mkdir(parents=True)
        return {"name": "numa", "host_path": f"/var/lib/kubelet/{name}", "mount": NUMA, "read_only": True}

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def described(
    suite: Suite, *volumes: dict[str, Any], vet: dict[str, Any] | None = None, **options: Any
) -> None:
    """Write the systems file: nodes are vetted; a single pod goes to the second node if it may."""
    spec: dict[str, Any] = {"affinity": {"nodeAffinity": FIRST}, **options.pop("spec", {})}
    manifest = {} if "kind" in options else {"manifest": {"spec": {"template": {"spec": spec}}}}
    small = {"cores": 1, "memory": "2GiB"}  # two pods have room beside each other, wherever they are
    suite.partition({"vet": vet or VET, "nodes": small}, **manifest, **options)
    path = suite.folder / "systems.yaml"
    systems = json.loads(path.read_text())
    systems["systems"]["cluster"]["partitions"]["part"]["kubernetes"]["volumes"] += volumes
    path.write_text(json.dumps(systems))


def created(suite: Suite) -> list[dict[str, Any]]:
    """Return the workloads of the last session as they were created last, one of each allocation."""
    found = sorted(suite.state.glob("runs/*/*/manifests.json"), key=lambda path: path.stat().st_mtime)
    items = [json.loads(path.read_text())["items"] for path in found]
    return [one for listed in items for one in listed if one["kind"] in {"Job", "Pod"}]


def mlhpc_vet(suite: Suite, *words: str) -> str:
    """Return what `mlhpc vet` prints."""
    shown = suite.cluster.run(
        "env", "-C", suite.folder, f"MLHPC_STATE={suite.state}", sys.executable, "-m", "pytest_mlhpc.cli", "vet", *words
    )  # fmt: skip
    assert shown.returncode == 0, f"{shown.stdout}\n{shown.stderr}"
    return shown.stdout


def figures(suite: Suite, word: str) -> list[dict[str, Any]]:
    """Return what the history keeps of quantities whose key has *word*."""
    lines = [
        json.loads(line)
        for path in suite.state.glob("vetting/history/*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if word in line.get("key", "")]


def test_a_node_that_its_init_container_finds_unfit_is_named_recorded_and_gone_round(pod_suite, numa):
    described(pod_suite, numa(1, 2))
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["vetting"]["unfit"] == {BAD: UNFIT}
    assert record["vetting"]["fit"] == record["nodes"] == [GOOD]
    assert record["job_id"].endswith("-r1")
    (job,) = created(pod_suite)
    assert _kept_off(job) == [BAD]
    said = mlhpc_vet(pod_suite, "history", "--system", "cluster")
    assert BAD in said
    assert "numa is 2, 1 is described" in said


def _kept_off(job: dict[str, Any]) -> list[str]:
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity[REQUIRED]["nodeSelectorTerms"]
    fields = [field for term in terms for field in term["matchFields"] if field["operator"] == "NotIn"]
    return [value for field in fields for value in field["values"]]


@pytest.mark.slow
def test_a_later_session_keeps_away_from_a_node_that_was_unfit(pod_suite, numa):
    described(pod_suite, numa(1, 2))
    pod_suite.tests(ONE)
    pod_suite.run().expect(0, passed=1)
    result = pod_suite.run()
    result.expect(0, passed=1)
    record = result.records[-1]
    assert record["vetting"]["kept_out"] == {BAD: UNFIT}
    assert record["vetting"]["unfit"] == {}
    assert not record["job_id"].endswith("-r1")
    assert record["nodes"] == [GOOD]


@pytest.mark.slow
def test_nodes_that_are_all_unfit_are_all_recorded(pod_suite, numa):
    described(pod_suite, numa(2, 2), reprovision=1)
    pod_suite.tests(ONE)
    result = pod_suite.run("-o", "mlhpc_infra_exit_code=75")
    result.expect(
        75,
        f"unfit_nodes: unfit nodes: {GOOD}: {UNFIT}, before that {BAD}; "
        "provisioned 2 times, no more (kubernetes: reprovision)",
        error=1,
    )
    (record,) = result.records
    assert record["verdict"] == "unfit_nodes"
    assert record["vetting"]["unfit"] == {GOOD: UNFIT, BAD: UNFIT}


@pytest.mark.slow
def test_without_a_probe_the_agent_finds_it_and_the_job_is_made_again_elsewhere(pod_suite, numa):
    described(pod_suite, numa(1, 2), probe=False)
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    first, second = result.records
    assert (first["verdict"], first["nodes"]) == ("unfit_nodes", [BAD])
    assert first["vetting"]["unfit"] == {BAD: UNFIT}
    assert second["vetting"]["unfit"] == {BAD: UNFIT}
    assert second["nodes"] == second["vetting"]["fit"] == [GOOD]


@pytest.mark.slow
def test_what_nobody_can_judge_in_a_container_is_no_nodes_fault_and_fails_closed(pod_suite, numa):
    described(pod_suite, numa(1, 1), vet={**QUICK, "unknown": "fail"})
    pod_suite.tests(ONE)
    result = pod_suite.run("-o", "mlhpc_infra_exit_code=75")
    result.expect(75, "unfit_nodes: 0 of 1 needed nodes are fit, and 1 could not be judged", error=1)
    assert {record["verdict"] for record in result.records} == {"unfit_nodes"}
    assert not list(pod_suite.state.glob("runs/*/*/unfit.jsonl"))


@pytest.mark.slow
def test_two_pods_vet_at_the_same_time_and_are_known_by_their_nodes(pod_suite):
    described(pod_suite, kind="pods", spread="required", vet=QUICK)
    pod_suite.tests(BOTH)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert sorted(record["vetting"]["fit"]) == sorted(record["nodes"]) == [GOOD, BAD]
    assert {rank["host"] for rank in record["measurement"]["per_rank"]}
    exchanged = figures(pod_suite, "pair/")
    assert [sorted(line["values"]) for line in exchanged] == [[GOOD, BAD]] * len(exchanged)
    assert exchanged


@pytest.mark.slow
def test_one_of_two_pods_on_an_unfit_node_has_both_asked_for_again(pod_suite, numa):
    described(pod_suite, numa(1, 2), kind="pods", spread="preferred")
    pod_suite.tests(BOTH)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["vetting"]["unfit"] == {BAD: UNFIT}
    assert record["vetting"]["fit"] == [GOOD]
    assert record["nodes"] == [GOOD, GOOD]


@pytest.mark.slow
def test_nodes_are_vetted_from_outside_and_named_for_manifests(pod_suite, numa, tmp_path):
    described(pod_suite, numa(1, 2), kind="pods", spread="required")
    out = tmp_path / "vet"
    said = mlhpc_vet(
        pod_suite, "quick", "--system", "cluster:part", "--systems-file", "systems.yaml", "--nodes", "2", "--need", "1",
        "--unknown", "warn", "--budget", "900", "--output", str(out),
    )  # fmt: skip
    assert re.search(
        rf"^CRITICAL +\S+ \(node {BAD}\) +inventory +\[node_problem\] numa is 2, 1 is described$",
        said,
        re.MULTILINE,
    )
    assert said.splitlines()[-1].startswith("GO 1/2 nodes, ")
    assert (out / "nodelist.txt").read_text() == f"{GOOD}\n"
    (term,) = json.loads((out / "k8s-affinity.json").read_text())["nodeAffinity"][REQUIRED][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [BAD]}
    ]


@pytest.mark.slow
def test_a_read_only_root_file_system_and_any_user_are_enough(pod_suite):
    worker = {"name": "worker", "securityContext": {"readOnlyRootFilesystem": True}}
    described(
        pod_suite, vet=QUICK, spec={"containers": [worker]},
        run_as_user=4242, run_as_group=4242, fs_group=4242,
    )  # fmt: skip
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["vetting"]["fit"] == record["nodes"]
    assert figures(pod_suite, "")  # it has computed
    (job,) = created(pod_suite)
    pod = job["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
