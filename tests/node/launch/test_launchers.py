"""Launchers turn a run plan into an argument vector and an environment, nothing else."""

import subprocess
import sys

import pytest
from launching import PODS, SLURM, WORKER, run_plan

from pytest_mlhpc.node.launch import mpirun, plain, podrun, poprun, srun, torchrun
from pytest_mlhpc.node.worker import environment


@pytest.mark.parametrize("environment", [{"A": "1"}, PODS])
def test_plain_starts_the_worker_with_the_environments_interpreter(environment):
    assert plain(run_plan(), ["a"], environment) == (WORKER, environment)


def test_torchrun_on_one_pod_of_several_needs_no_podrun():
    assert torchrun(run_plan(ranks=2), ["a"], PODS)[0][0] == WORKER[0]


@pytest.mark.parametrize("launcher", [plain, poprun])
def test_a_program_is_started_as_it_is(launcher):
    run = run_plan(workload="command", argv=("./bench", "$HOME; true"))
    assert launcher(run, ["a"], SLURM)[0][-2:] == ["./bench", "$HOME; true"]
    assert plain(run, ["here"], {})[0] == ["./bench", "$HOME; true"]


@pytest.mark.parametrize(("given", "cores"), [({}, "3"), ({"OMP_NUM_THREADS": "7"}, "7")])
def test_torchrun_gives_each_rank_its_cores_unless_stated_otherwise(given, cores):
    assert torchrun(run_plan(), ["here"], given)[1]["OMP_NUM_THREADS"] == cores


@pytest.mark.parametrize(("step", "shares"), [({"SLURM_STEP_ID": "0"}, True), ({}, False)])
def test_a_batch_that_is_a_step_itself_shares_its_cpus(step, shares):
    assert ("--overlap" in srun(run_plan(), ["a"], {**SLURM, **step})[0]) is shares


def test_torchrun_starts_all_ranks_of_the_node():
    argv, _ = torchrun(run_plan(ranks=4), ["here"], {})
    assert argv[0] == WORKER[0]
    # Port 0 is a free one, never one where a neighbour may listen.
    assert {"--nproc_per_node=4", "--max_restarts=0", "--rdzv_endpoint=localhost:0"} <= set(argv)
    assert argv[-2:] == WORKER[1:]


def test_srun_starts_each_rank_as_a_task_of_one_step():
    argv, environment = srun(run_plan(ranks=4, nodes=2), ["a", "b"], SLURM)
    assert argv == [
        "srun", "--job-name=run-1", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3", "--nodelist=a,b",
        "--distribution=block", "--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none", "--cpu-bind=cores",
        *WORKER,
    ]  # fmt: skip
    assert environment == {**SLURM, "OMP_NUM_THREADS": "3", "MLHPC_RANKS_FROM": "slurm"}


def test_a_sites_own_options_come_last_and_a_hint_replaces_our_binding():
    run = run_plan(launcher_options=("--hint=nomultithread", "--gpus-per-task=1"))
    argv, _ = srun(run, ["a"], SLURM)
    assert "--cpu-bind=cores" not in argv
    assert argv[-5:-3] == ["--hint=nomultithread", "--gpus-per-task=1"]


@pytest.mark.parametrize(
    ("launcher", "changes", "nodes", "environment", "says"),
    [
        (plain, {"ranks": 2}, ["a"], {}, "launcher plain starts one rank on one node"),
        (plain, {}, ["a", "b"], {}, "launcher plain starts one rank on one node"),
        (srun, {"ranks": 3}, ["a", "b"], SLURM, "3 ranks cannot be shared evenly by 2 nodes"),
        (mpirun, {"ranks": 3}, ["a", "b"], SLURM, "3 ranks cannot be shared evenly by 2 nodes"),
        (torchrun, {"ranks": 3}, ["a", "b"], SLURM, "3 ranks cannot be shared evenly by 2 nodes"),
        (podrun, {"ranks": 3}, ["a", "b"], PODS, "3 ranks cannot be shared evenly by 2 nodes"),
        (poprun, {"ranks": 3}, ["a", "b"], SLURM, "3 ranks cannot be shared evenly by 2 nodes"),
        (srun, {"ranks": 2}, ["a", "b"], {}, "needs a Slurm job"),
        (torchrun, {"ranks": 2}, ["a", "b"], {}, "needs a Slurm job"),
        (podrun, {"ranks": 2}, ["a", "b"], {}, "launcher podrun needs several pods, this is none"),
        (podrun, {"ranks": 2}, ["a", "b"], SLURM, "launcher podrun needs several pods, this is slurm"),
        (
            podrun,
            {"ranks": 2, "launcher_options": ("--hint=x",)},
            ["a", "b"],
            PODS,
            "launcher_options are for srun and mpirun, pods take none: --hint=x",
        ),
        (poprun, {"launcher_options": ("--mpi-local-args=-x A",)}, ["a"], SLURM, "--mpi-local-args is ours"),
    ],
)
def test_a_launcher_refuses_what_it_cannot_start(launcher, changes, nodes, environment, says):
    run = run_plan(**{"nodes": len(nodes), **changes})
    with pytest.raises(ValueError, match=says):
        launcher(run, nodes, environment)


@pytest.mark.parametrize("launcher", [srun, mpirun, torchrun, plain])
def test_a_wrapper_goes_before_the_interpreter(launcher):
    argv, _ = launcher(run_plan(wrapper=("apptainer", "exec", "x.sif")), ["a"], SLURM)
    place = argv.index("apptainer")
    assert argv[place : place + 4] == ["apptainer", "exec", "x.sif", "/env/bin/python"]


def test_torchrun_on_several_nodes_has_one_agent_a_node():
    argv, environment = torchrun(run_plan(ranks=4, nodes=2), ["a", "b"], SLURM)
    of_step = {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"}
    assert (argv[0], environment["MLHPC_RANKS_FROM"]) == ("srun", "slurm")
    assert of_step | {"--nnodes=2", "--nproc_per_node=2", "--master_addr=a", "--master_port=5"} <= set(argv)


def test_plain_on_another_node_is_a_step_of_one_task():
    argv, _ = plain(run_plan(), ["b"], SLURM)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=b"} <= set(argv)
    assert plain(run_plan(), ["a"], SLURM)[0][0] == "/env/bin/python"


def test_torchrun_on_several_pods_has_one_agent_a_pod_started_by_podrun():
    argv, environment = torchrun(run_plan(ranks=4, nodes=2), ["a", "b"], PODS)
    assert argv[:7] == [sys.executable, "-m", "pytest_mlhpc.node.batch.podrun", "run-1", "2", "1", "--"]
    assert argv[7:10] == ["/env/bin/python", "-m", "pytest_mlhpc.node.torchrun"]
    assert {"--nnodes=2", "--nproc_per_node=2", "--master_addr=10.0.0.1", "--master_port=5"} <= set(argv)
    assert (environment["MLHPC_RANKS_FROM"], environment["OMP_NUM_THREADS"]) == ("pods", "3")


def test_podrun_starts_each_rank_on_its_pod():
    run = run_plan(ranks=4, nodes=2, workload="command", argv=("./bench", "x y"))
    podrun_argv = [sys.executable, "-m", "pytest_mlhpc.node.batch.podrun", "run-1", "2", "2", "--ranks", "--"]
    expected = [*podrun_argv, "./bench", "x y"], {**PODS, "OMP_NUM_THREADS": "3"}
    assert podrun(run, ["a", "b"], PODS) == expected


def test_mpirun_names_nodes_and_forwards_what_a_rank_needs():
    run = run_plan(ranks=4, nodes=2, variables={"NCCL_DEBUG": "INFO"})
    given = {**SLURM, "NCCL_DEBUG": "INFO", "MLHPC_RUN": "r", "HOSTNAME": "a"}
    argv, _ = mpirun(run, ["a", "b"], given)
    assert argv[:9] == ["mpirun", "-n", "4", "-N", "2", "--host", "a:2,b:2", "--bind-to", "none"]
    forwarded = {argv[place + 1] for place, word in enumerate(argv) if word == "-x"}
    assert {"NCCL_DEBUG", "MLHPC_RUN", "MLHPC_RANKS_FROM", "MASTER_ADDR", "OMP_NUM_THREADS"} <= forwarded
    assert "HOSTNAME" not in forwarded


def test_mpirun_leaves_binding_to_the_site_where_that_has_an_opinion():
    argv, _ = mpirun(run_plan(launcher_options=("--map-by", "socket")), ["a"], SLURM)
    assert "--bind-to" not in argv


def test_a_rank_takes_its_place_from_whom_the_launcher_names():
    environ = {"MLHPC_RANKS_FROM": "slurm", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    environment.adopt(environ)
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("3", "1", "4")


def test_nothing_is_guessed_where_no_launcher_is_named():
    environ = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    environment.adopt(environ)
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
        environment.adopt(environ)


def test_a_launcher_imports_no_torch():
    code = (
        "import sys, pytest_mlhpc.node.launch, pytest_mlhpc.node.torchrun; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
