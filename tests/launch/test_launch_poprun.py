"""PopRun's argument vector: the words of Graphcore's own examples. No poprun has run it."""

from __future__ import annotations

import shlex
from dataclasses import replace

from launching import PODS, SLURM, WORKER, run_plan

from pytest_mlhpc.launch import module_of, poprun


def launch(run, nodes=("a",), environment=SLURM):
    """Launch a run of four instances; return the argument vector and the environment."""
    return poprun.launch(
        replace(run, ranks=4, device_type="ipu", launcher="poprun"), list(nodes), environment
    )


def forwarded(argv) -> set[str]:
    (word,) = [word for word in argv if word.startswith("--mpi-local-args=")]
    words = shlex.split(word.partition("=")[2])
    assert words[::2] == ["-x"] * (len(words) // 2)
    return set(words[1::2])


def test_an_instance_is_a_rank_with_its_replicas():
    run = run_plan(parameters={"ipu_replicas": 2, "ipus_per_replica": 4})
    argv, environment = launch(run, ["a"], SLURM)
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=8", "--ipus-per-replica=4"]
    assert argv[-3:] == WORKER
    assert environment["MLHPC_RANKS_FROM"] == "openmpi"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_without_fields_each_rank_has_one_ipu():
    argv, _ = launch(run_plan(), ["a"], SLURM)
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=4", "--ipus-per-replica=1"]
    assert not any(word.startswith("--host") for word in argv)


def test_several_nodes_are_named_and_variables_forwarded():
    given = {**SLURM, "OWN": "1", "MLHPC_RUN": "r", "HOSTNAME": "a", "POPLAR_ENGINE_OPTIONS": "{}"}
    argv, _ = launch(run_plan(nodes=2, variables={"OWN": "1"}), ["a", "b"], given)
    assert "--host=a,b" in argv
    assert {"OWN", "MLHPC_RUN", "MLHPC_RANKS_FROM", "MASTER_ADDR", "POPLAR_ENGINE_OPTIONS"} <= forwarded(argv)
    assert "HOSTNAME" not in forwarded(argv)


def test_a_single_node_that_is_not_the_batchs_own_is_named_too():
    assert "--host=b" in launch(run_plan(), ["b"], SLURM)[0]


def test_words_of_the_site_come_last_before_the_worker():
    options = ("--vipu-partition=pod64", "--mpi-global-args=--tag-output")
    argv, _ = launch(run_plan(launcher_options=options), ["a"], PODS)
    assert argv[-5:-3] == list(options)
    assert [word for word in argv if word.startswith("--mpi-global-args")] == [options[1]]


def test_in_a_pod_openmpi_may_be_roots():
    assert "--mpi-global-args=--allow-run-as-root" in launch(run_plan(), ["a"], PODS)[0]
    assert not any(word.startswith("--mpi-global") for word in launch(run_plan(), ["a"], SLURM)[0])


def test_its_module_is_one_of_ours():
    assert module_of("poprun") == "pytest_mlhpc.launch.poprun"
