"""A run that can never start is refused before anything is submitted, by its own options."""

from pathlib import Path

import pytest
from manifests import ENVIRONMENT, partition
from pod_worlds import FakeApi, FakeClusters
from worlds import spec

from pytest_mlhpc.config.model import Target
from pytest_mlhpc.provision.kubernetes.provisioner import KubernetesProvisioner

TIMED = partition(max_time="100s")
IPUS = partition("ipu", 8, kind="ipujob")
NINE = {"manifest": {"spec": {"completions": 9}}}
PRIORITY = {"manifest": {"spec": {"template": {"spec": {"priority": 5}}}}}
FOUR_IPUS = {"ipus_per_replica": 2, "ipu_replicas": 2}
TWO_NODES = {"nodes": 2, "ranks": 2}
CONTRADICTS = "manifest of kind 'job': spec.completions"


@pytest.mark.parametrize(
    ("where", "asked", "text"),
    [
        pytest.param(TIMED, {"time_limit_s": 100.0}, "", id="within the partition's time"),
        pytest.param(
            TIMED, {"time_limit_s": 150.0}, "150 s are wanted, site:part gives 100 s (kubernetes: max_time)",
            id="beyond the partition's time",
        ),
        pytest.param(
            TIMED, {"time_limit_s": 150.0, "scheduler_options": {"max_time": 200.0}}, "", id="a test's own time is longer"
        ),
        pytest.param(
            TIMED, {"time_limit_s": 100.0, "scheduler_options": {"max_time": 50.0}}, "gives 50 s", id="a test's own time is shorter"
        ),
        pytest.param(partition(**NINE), TWO_NODES, CONTRADICTS, id="the partition's manifest contradicts the run"),
        pytest.param(partition(), {**TWO_NODES, "scheduler_options": NINE}, CONTRADICTS, id="the test's manifest contradicts it"),
        pytest.param(partition(), {**TWO_NODES, "scheduler_options": PRIORITY}, "", id="the test's manifest adds to it"),
        pytest.param(
            partition(), {"scheduler_options": {"kind": "nothing"}}, "kind 'nothing' is not one of", id="an unknown kind of the test"
        ),
        pytest.param(IPUS, {"ranks": 2, "parameters": FOUR_IPUS}, "", id="IPUs of ranks are counted"),
        pytest.param(
            IPUS, {"ranks": 4, "parameters": FOUR_IPUS}, "16 devices a node are wanted, a node of site:part has 8",
            id="more IPUs than a node has",
        ),
        pytest.param(
            IPUS, {"ranks": 3}, "3 IPUs are wanted, but a partition of IPUs has a power of 2 of them", id="three IPUs"
        ),
        pytest.param(IPUS, TWO_NODES, "site:part: IPUJob has at most", id="more pods than the kind has"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_without_asking_the_server(where, asked, text):
    api = FakeApi()
    provisioner = KubernetesProvisioner(where, FakeClusters(api), lambda _sha: Path("unused"), "session")
    try:
        refusal = provisioner.validate(spec(target=Target(where, ENVIRONMENT), **asked))
    finally:
        provisioner.close()
    assert text in refusal
    assert bool(refusal) == bool(text)
    assert api.calls == []
