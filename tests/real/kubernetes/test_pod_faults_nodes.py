"""Nodes that the probe finds unfit, on the real cluster with its two nodes."""

import json

import pytest
from faults import ONE

#: An interpreter that finds nothing wrong but on nodes that are listed: there the probe cannot write a file.
PYTHON = """\
#!/bin/sh
# Whoever comes first is the unfit one, unless a list of unfit nodes is there already.
mkdir {folder}/decided 2>/dev/null && [ ! -e {folder}/unfit ] && echo "$MLHPC_NODE_NAME" > {folder}/unfit
case "$*" in
*batch.probe*) if grep -qx "$MLHPC_NODE_NAME" {folder}/unfit; then ulimit -f 0; fi;;
esac
exec {python} "$@"
"""


def with_unfit(suite, *nodes):
    """Let the probe find these nodes unfit; without any, the first one that a pod comes to."""
    path = suite.folder / "python"
    python = suite.cluster.environment["MLHPC_TEST_PYTHON"]
    path.write_text(PYTHON.format(folder=suite.folder, python=python))
    path.chmod(0o755)
    if nodes:
        (suite.folder / "unfit").write_text("".join(f"{node}\n" for node in nodes))
    return {"environments": {"default": {"python": str(path)}}}


def test_an_unfit_node_is_gone_round_and_recorded(pod_suite, kubernetes):
    pod_suite.partition(with_unfit(pod_suite))
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    unfit = (pod_suite.folder / "unfit").read_text().strip()
    assert {unfit, *record["nodes"]} == {"127.0.0.1", "127.0.0.2"}
    assert record["job_id"].endswith("-r1")
    (listed,) = pod_suite.state.glob("runs/*/*/manifests.json")
    (job,) = [one for one in json.loads(listed.read_text())["items"] if one["kind"] == "Job"]
    assert unfit in json.dumps(job["spec"]["template"]["spec"]["affinity"])
    (noted,) = pod_suite.state.glob("runs/*/*/unfit.jsonl")
    text = "cannot write /mlhpc/work: File too large"
    assert json.loads(noted.read_text()) == {"round": 0, "node": unfit, "text": text}


@pytest.mark.slow
def test_an_unfit_node_with_no_other_to_go_to_is_waited_for_within_the_patience(pod_suite):
    only = {"node_selector": {"kubernetes.io/hostname": "127.0.0.2"}, "patience": {"unschedulable": "3s"}}
    pod_suite.partition(with_unfit(pod_suite, "127.0.0.2"), **only)
    pod_suite.tests(ONE)
    result = pod_suite.run("-o", "mlhpc_infra_exit_code=75")
    result.expect(75, "never_scheduled: Unschedulable: 0/2 nodes are available", "without 127.0.0.2", error=1)
