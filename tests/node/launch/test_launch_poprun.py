"""PopRun's argument vector: the words of Graphcore's own examples. No poprun has run it."""

import shlex
from dataclasses import replace

from launching import PODS, SLURM, WORKER, run_plan

from pytest_mlhpc.node.launch import poprun


def launch(run, nodes=("a",), environment=SLURM):
    """Launch a run of four instances; return the argument vector and the environment."""
    run = replace(run, ranks=4, device_type="ipu", launcher="poprun")
    return poprun(run, list(nodes), environment)


def test_an_instance_is_a_rank_with_its_replicas():
    argv, environment = launch(run_plan(parameters={"ipu_replicas": 2, "ipus_per_replica": 4}))
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=8", "--ipus-per-replica=4"]
    assert argv[-3:] == WORKER
    assert (environment["MLHPC_RANKS_FROM"], environment["OMP_NUM_THREADS"]) == ("openmpi", "3")


def test_without_fields_each_rank_has_one_ipu():
    argv, _ = launch(run_plan(), ["a"], SLURM)
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=4", "--ipus-per-replica=1"]
    assert not any(word.startswith("--host") for word in argv)


def test_several_nodes_are_named_and_variables_forwarded():
    given = {**SLURM, "OWN": "1", "MLHPC_RUN": "r", "HOSTNAME": "a", "POPLAR_ENGINE_OPTIONS": "{}"}
    argv, _ = launch(run_plan(nodes=2, variables={"OWN": "1"}), ["a", "b"], given)
    (local,) = [word for word in argv if word.startswith("--mpi-local-args=")]
    options, forwarded = (shlex.split(local.partition("=")[2])[start::2] for start in (0, 1))
    assert ("--host=a,b" in argv, set(options)) == (True, {"-x"})
    assert {"OWN", "MLHPC_RUN", "MLHPC_RANKS_FROM", "MASTER_ADDR", "POPLAR_ENGINE_OPTIONS"} <= {*forwarded}
    assert "HOSTNAME" not in forwarded


def test_a_single_node_that_is_not_the_batchs_own_is_named_too():
    assert "--host=b" in launch(run_plan(), ["b"], SLURM)[0]


def test_arguments_of_the_site_come_last_before_the_worker():
    options = ("--vipu-partition=pod64", "--mpi-global-args=--tag-output")
    argv, _ = launch(run_plan(launcher_options=options), ["a"], PODS)
    assert argv[-5:-3] == list(options)
    assert [word for word in argv if word.startswith("--mpi-global-args")] == [options[1]]


def test_in_a_pod_openmpi_may_be_roots():
    assert "--mpi-global-args=--allow-run-as-root" in launch(run_plan(), ["a"], PODS)[0]
    assert not any(word.startswith("--mpi-global") for word in launch(run_plan(), ["a"], SLURM)[0])
