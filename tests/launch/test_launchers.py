"""Launchers turn a run plan into an argument vector and an environment, nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.launch import mpirun, plain, podrun, srun, torchrun
from pytest_mlhpc.worker import elastic, identity

PODS = {"MLHPC_SCHEDULER": "pods", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
SLURM = {"MLHPC_SCHEDULER": "slurm", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "a", "MASTER_PORT": "5"}


def run_plan(**changes) -> RunPlan:
    fields = {
        "run_id": "run-1", "nonce": "nonce", "attempt": 0, "workload": "resnet50", "parameters": {}, "nodes": 1,
        "ranks": 1, "cores_per_rank": 3, "device_type": "cpu", "launcher": "plain", "time_limit_s": 30.0, "steps": 1,
        "warmup_steps": 0, "python": "/env/bin/python",
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def test_plain_starts_the_worker_with_the_environments_interpreter():
    argv, environment = plain.launch(run_plan(), ["here"], {"A": "1"})
    assert argv == ["/env/bin/python", "-m", "pytest_mlhpc.worker.main"]
    assert environment == {"A": "1"}


def test_plain_starts_a_program_as_it_is():
    run = run_plan(workload="command", argv=("./bench", "$HOME; true"))
    assert plain.launch(run, ["here"], {})[0] == ["./bench", "$HOME; true"]


@pytest.mark.parametrize(("ranks", "nodes"), [(2, ["a"]), (1, ["a", "b"])])
def test_plain_refuses_more_than_one(ranks, nodes):
    with pytest.raises(ValueError, match="launcher plain starts one rank on one node"):
        plain.launch(run_plan(ranks=ranks), nodes, {})


def test_torchrun_starts_all_ranks_of_the_node():
    argv, _ = torchrun.launch(run_plan(ranks=4), ["here"], {})
    assert argv[0] == "/env/bin/python"
    assert "--nproc_per_node=4" in argv
    assert "--max_restarts=0" in argv
    assert "--rdzv_endpoint=localhost:0" in argv  # a free port, never one where a neighbour may listen
    assert argv[-2:] == ["-m", "pytest_mlhpc.worker.main"]


def test_torchrun_gives_each_rank_its_cores_unless_told_otherwise():
    assert torchrun.launch(run_plan(), ["here"], {})[1]["OMP_NUM_THREADS"] == "3"
    assert torchrun.launch(run_plan(), ["here"], {"OMP_NUM_THREADS": "7"})[1]["OMP_NUM_THREADS"] == "7"


def test_srun_starts_each_rank_as_a_task_of_one_step():
    argv, environment = srun.launch(run_plan(ranks=4, nodes=2), ["a", "b"], SLURM)
    assert argv == [
        "srun", "--job-name=run-1", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3", "--nodelist=a,b",
        "--distribution=block", "--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none", "--cpu-bind=cores",
        "/env/bin/python", "-m", "pytest_mlhpc.worker.main",
    ]  # fmt: skip
    assert environment == {**SLURM, "OMP_NUM_THREADS": "3", "MLHPC_RANKS_FROM": "slurm"}


def test_a_sites_own_options_come_last_and_a_hint_replaces_our_binding():
    run = run_plan(launcher_options=("--hint=nomultithread", "--gpus-per-task=1"))
    argv, _ = srun.launch(run, ["a"], SLURM)
    assert "--cpu-bind=cores" not in argv
    assert argv[-5:-3] == ["--hint=nomultithread", "--gpus-per-task=1"]


def test_a_batch_that_is_a_step_itself_shares_its_cpus():
    assert "--overlap" in srun.launch(run_plan(), ["a"], {**SLURM, "SLURM_STEP_ID": "0"})[0]
    assert "--overlap" not in srun.launch(run_plan(), ["a"], SLURM)[0]


@pytest.mark.parametrize("module", [srun, mpirun, torchrun])
def test_ranks_that_cannot_be_shared_evenly_are_refused(module):
    with pytest.raises(ValueError, match="3 ranks cannot be shared evenly by 2 nodes"):
        module.launch(run_plan(ranks=3), ["a", "b"], SLURM)


@pytest.mark.parametrize("module", [srun, torchrun])
def test_several_nodes_need_a_slurm_job(module):
    with pytest.raises(ValueError, match="needs a Slurm job"):
        module.launch(run_plan(ranks=2), ["a", "b"], {})


@pytest.mark.parametrize("module", [srun, mpirun, torchrun, plain])
def test_a_wrapper_goes_before_the_interpreter(module):
    argv, _ = module.launch(run_plan(wrapper=("apptainer", "exec", "x.sif")), ["a"], SLURM)
    place = argv.index("apptainer")
    assert argv[place : place + 4] == ["apptainer", "exec", "x.sif", "/env/bin/python"]


def test_torchrun_on_several_nodes_has_one_agent_a_node():
    argv, environment = torchrun.launch(run_plan(ranks=4, nodes=2), ["a", "b"], SLURM)
    assert argv[0] == "srun"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"} <= set(argv)
    assert {"--nnodes=2", "--nproc_per_node=2", "--master_addr=a", "--master_port=5"} <= set(argv)
    assert environment["MLHPC_RANKS_FROM"] == "slurm"


def test_plain_on_another_node_is_a_step_of_one_task():
    argv, _ = plain.launch(run_plan(), ["b"], SLURM)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=b"} <= set(argv)
    assert plain.launch(run_plan(), ["a"], SLURM)[0][0] == "/env/bin/python"


def test_torchrun_on_several_pods_has_one_agent_a_pod_started_by_podrun():
    argv, environment = torchrun.launch(run_plan(ranks=4, nodes=2), ["a", "b"], PODS)
    assert argv[:7] == [sys.executable, "-m", "pytest_mlhpc.batch.podrun", "run-1", "2", "1", "--"]
    assert argv[7:10] == ["/env/bin/python", "-m", "pytest_mlhpc.worker.elastic"]
    assert {"--nnodes=2", "--nproc_per_node=2", "--master_addr=10.0.0.1", "--master_port=5"} <= set(argv)
    assert (environment["MLHPC_RANKS_FROM"], environment["OMP_NUM_THREADS"]) == ("pods", "3")


def test_on_one_pod_of_several_nothing_stands_between():
    assert torchrun.launch(run_plan(ranks=2), ["a"], PODS)[0][0] == "/env/bin/python"
    assert plain.launch(run_plan(), ["a"], PODS)[0] == ["/env/bin/python", "-m", "pytest_mlhpc.worker.main"]


def test_podrun_starts_each_rank_on_its_pod():
    run = run_plan(ranks=4, nodes=2, workload="command", argv=("./bench", "x y"))
    argv, environment = podrun.launch(run, ["a", "b"], PODS)
    assert argv == [
        sys.executable,
        "-m",
        "pytest_mlhpc.batch.podrun",
        "run-1",
        "2",
        "2",
        "--ranks",
        "--",
        "./bench",
        "x y",
    ]
    assert environment == {**PODS, "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("changes", "environment", "says"),
    [
        ({}, {}, "launcher podrun needs several pods, this is none"),
        ({}, SLURM, "launcher podrun needs several pods, this is slurm"),
        ({"ranks": 3}, PODS, "3 ranks cannot be shared evenly by 2 nodes"),
        (
            {"launcher_options": ("--hint=x",)},
            PODS,
            "launcher_options are for srun and mpirun, pods take none: --hint=x",
        ),
    ],
)
def test_podrun_refuses_what_it_cannot_do(changes, environment, says):
    with pytest.raises(ValueError, match=says):
        podrun.launch(run_plan(**{"ranks": 2, "nodes": 2, **changes}), ["a", "b"], environment)


def test_mpirun_names_nodes_and_forwards_what_a_rank_needs():
    run = run_plan(ranks=4, nodes=2, variables={"NCCL_DEBUG": "INFO"})
    argv, _ = mpirun.launch(
        run, ["a", "b"], {**SLURM, "NCCL_DEBUG": "INFO", "MLHPC_RUN": "r", "HOSTNAME": "a"}
    )
    assert argv[:9] == ["mpirun", "-n", "4", "-N", "2", "--host", "a:2,b:2", "--bind-to", "none"]
    forwarded = {argv[place + 1] for place, word in enumerate(argv) if word == "-x"}
    assert {"NCCL_DEBUG", "MLHPC_RUN", "MLHPC_RANKS_FROM", "MASTER_ADDR", "OMP_NUM_THREADS"} <= forwarded
    assert "HOSTNAME" not in forwarded


def test_mpirun_leaves_binding_to_the_site_where_that_has_an_opinion():
    argv, _ = mpirun.launch(run_plan(launcher_options=("--map-by", "socket")), ["a"], SLURM)
    assert "--bind-to" not in argv


def test_a_rank_takes_its_place_from_whom_the_launcher_names():
    environ = {"MLHPC_RANKS_FROM": "slurm", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    identity.adopt(environ)
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("3", "1", "4")


def test_nothing_is_guessed_where_no_launcher_is_named():
    environ = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    identity.adopt(environ)
    assert "RANK" not in environ


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MLHPC_RANKS_FROM": "slurm", "SLURM_PROCID": "x"}, "SLURM_PROCID='x' is no number"),
        ({"MLHPC_RANKS_FROM": "openmpi"}, "OMPI_COMM_WORLD_RANK='' is no number"),
        ({"MLHPC_RANKS_FROM": "guess"}, "'guess' is none of slurm, openmpi"),
    ],
)
def test_a_launcher_that_does_not_tell_is_an_error(environ, says):
    with pytest.raises(ValueError, match=says):
        identity.adopt(environ)


def test_an_agent_of_torchrun_has_its_nodes_number_and_its_ranks_do_not_ask_slurm():
    environ = {"MLHPC_RANKS_FROM": "slurm", "SLURM_NODEID": "1"}
    elastic.take_place(environ)
    assert environ == {"PET_NODE_RANK": "1", "SLURM_NODEID": "1"}


def test_a_launcher_imports_no_torch():
    code = "import sys, pytest_mlhpc.launch.torchrun, pytest_mlhpc.launch.srun, pytest_mlhpc.launch.mpirun; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
