"""What can never run is refused before anything is submitted, by the options that the test itself leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manifests import ENVIRONMENT, partition
from pod_worlds import FakeApi, FakeClusters
from worlds import spec

from pytest_mlhpc.provision.kubernetes.provisioner import KubernetesProvisioner
from pytest_mlhpc.system.model import Partition, Target


def refused(where: Partition, **asked: Any) -> str:
    """Return why a test is refused; that nothing was asked of the server is checked as well."""
    api = FakeApi()
    provisioner = KubernetesProvisioner(where, FakeClusters(api), lambda _sha: Path("unused"), "session")
    try:
        return provisioner.validate(spec(target=Target(where, ENVIRONMENT), **asked))
    finally:
        provisioner.close()
        assert api.said == []


def test_a_tests_own_max_time_is_put_over_the_partitions():
    where = partition(max_time="100s")
    assert refused(where, time_limit_s=100.0) == ""
    assert (
        refused(where, time_limit_s=150.0) == "150 s are wanted, site:part gives 100 s (kubernetes: max_time)"
    )
    assert refused(where, time_limit_s=150.0, scheduler_options={"max_time": 200.0}) == ""
    assert "gives 50 s" in refused(where, time_limit_s=100.0, scheduler_options={"max_time": 50.0})


def test_a_manifest_that_contradicts_what_a_run_needs_is_refused():
    theirs = {"manifest": {"spec": {"completions": 9}}}
    assert "manifest of kind 'job': spec.completions" in refused(partition(**theirs), nodes=2, ranks=2)
    assert "manifest of kind 'job': spec.completions" in refused(
        partition(), nodes=2, ranks=2, scheduler_options=theirs
    )
    ours = {"manifest": {"spec": {"template": {"spec": {"priority": 5}}}}}
    assert refused(partition(), nodes=2, ranks=2, scheduler_options=ours) == ""


def test_ipus_of_a_rank_are_counted_and_come_in_powers_of_2():
    where = partition("ipu", 8, kind="ipujob")
    two = {"ipus_per_replica": 2, "ipu_replicas": 2}
    assert refused(where, ranks=2, parameters=two) == ""
    assert (
        refused(where, ranks=4, parameters=two) == "16 devices a node are wanted, a node of site:part has 8"
    )
    assert refused(where, ranks=3) == "3 IPUs are wanted, but a partition of IPUs has a power of 2 of them"


def test_a_kind_that_cannot_have_so_many_pods_is_refused():
    where = partition("ipu", 4, kind="ipujob")
    assert "site:part: IPUJob has at most" in refused(where, nodes=2, ranks=2)
