"""PopRun's argument vector: the words of Graphcore's own examples. No poprun has run it."""

from __future__ import annotations

import shlex

import pytest

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.launch import module_of, poprun

SLURM = {"MLHPC_SCHEDULER": "slurm", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
PODS = {"MLHPC_SCHEDULER": "pods", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}


def run_plan(**changes) -> RunPlan:
    fields = {
        "run_id": "run-1", "nonce": "nonce", "attempt": 0, "workload": "resnet50", "parameters": {}, "nodes": 1,
        "ranks": 4, "cores_per_rank": 3, "device_type": "ipu", "launcher": "poprun", "time_limit_s": 30.0, "steps": 1,
        "warmup_steps": 0, "python": "/env/bin/python",
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def forwarded(argv) -> set[str]:
    (word,) = [word for word in argv if word.startswith("--mpi-local-args=")]
    words = shlex.split(word.partition("=")[2])
    assert words[::2] == ["-x"] * (len(words) // 2)
    return set(words[1::2])


def test_an_instance_is_a_rank_with_its_replicas():
    run = run_plan(parameters={"ipu_replicas": 2, "ipus_per_replica": 4})
    argv, environment = poprun.launch(run, ["a"], SLURM)
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=8", "--ipus-per-replica=4"]
    assert argv[-3:] == ["/env/bin/python", "-m", "pytest_mlhpc.worker.main"]
    assert environment["MLHPC_RANKS_FROM"] == "openmpi"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_without_fields_each_rank_has_one_ipu():
    argv, _ = poprun.launch(run_plan(), ["a"], SLURM)
    assert argv[:4] == ["poprun", "--num-instances=4", "--num-replicas=4", "--ipus-per-replica=1"]
    assert not any(word.startswith("--host") for word in argv)


def test_several_nodes_are_named_and_variables_forwarded():
    given = {**SLURM, "OWN": "1", "MLHPC_RUN": "r", "HOSTNAME": "a", "POPLAR_ENGINE_OPTIONS": "{}"}
    argv, _ = poprun.launch(run_plan(nodes=2, variables={"OWN": "1"}), ["a", "b"], given)
    assert "--host=a,b" in argv
    assert {"OWN", "MLHPC_RUN", "MLHPC_RANKS_FROM", "MASTER_ADDR", "POPLAR_ENGINE_OPTIONS"} <= forwarded(argv)
    assert "HOSTNAME" not in forwarded(argv)


def test_a_single_node_that_is_not_the_batchs_own_is_named_too():
    assert "--host=b" in poprun.launch(run_plan(), ["b"], SLURM)[0]


def test_words_of_the_site_come_last_before_the_worker():
    options = ("--vipu-partition=pod64", "--mpi-global-args=--tag-output")
    argv, _ = poprun.launch(run_plan(launcher_options=options), ["a"], PODS)
    assert argv[-5:-3] == list(options)
    assert [word for word in argv if word.startswith("--mpi-global-args")] == [options[1]]


def test_in_a_pod_openmpi_may_be_roots():
    assert "--mpi-global-args=--allow-run-as-root" in poprun.launch(run_plan(), ["a"], PODS)[0]
    assert not any(word.startswith("--mpi-global") for word in poprun.launch(run_plan(), ["a"], SLURM)[0])


def test_programs_are_started_as_they_are():
    run = run_plan(workload="command", argv=("./bench", "$HOME; true"))
    assert poprun.launch(run, ["a"], SLURM)[0][-2:] == ["./bench", "$HOME; true"]


@pytest.mark.parametrize(
    ("changes", "nodes", "says"),
    [
        ({"ranks": 3, "nodes": 2}, ["a", "b"], "3 ranks cannot be shared evenly by 2 nodes"),
        ({"launcher_options": ("--mpi-local-args=-x A",)}, ["a"], "--mpi-local-args is ours"),
    ],
)
def test_what_it_cannot_start_is_refused(changes, nodes, says):
    with pytest.raises(ValueError, match=says):
        poprun.launch(run_plan(**changes), nodes, SLURM)


def test_its_module_is_one_of_ours():
    assert module_of("poprun") == "pytest_mlhpc.launch.poprun"
