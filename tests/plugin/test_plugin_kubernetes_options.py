"""A suite that says something under ``kubernetes`` runs unchanged elsewhere, and has its mistakes told where it counts."""

from __future__ import annotations

import pytest

CLUSTER = """\
  cluster:
    description: a Kubernetes that nobody asks here
    partitions:
      part:
        scheduler: kubernetes
        nodes: {cores: 2, memory: 2GiB}
        kubernetes: {image: torch}
        environments: {default: {python: python3}}
"""

SUITE = """
@job(kubernetes={"imge": "torch", "resources": {"limits": {"memory": "lots"}}}, judge=False)
def test_image(run):
    assert run["rate"].value == 4.0
"""


@pytest.fixture
def cluster(suite):
    with suite.pytester.path.joinpath("systems.yaml").open("a") as file:
        file.write(CLUSTER)
    suite.write(SUITE)
    return suite


def test_elsewhere_it_is_ignored(cluster, workers):
    result = cluster.run(n=workers)
    assert result.ret == 0, result.stdout.str()
    (record,) = cluster.records()
    assert "kubernetes" not in record["asked"]


def test_mistakes_are_told_at_collection(cluster, workers):
    result = cluster.run(system="cluster", n=workers)
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == 4, output
    where = "test_suite.py::test_image[cluster:part]: kubernetes"
    assert output.count(f"{where}.imge: unknown key (did you mean 'image'?)") == 1
    assert output.count(f"{where}.resources.limits.memory: 'lots' is not a quantity") == 1
    assert "Traceback" not in output
    assert cluster.nothing_was_written()
