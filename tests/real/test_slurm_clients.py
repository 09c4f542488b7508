"""One contract for every client of Slurm, on a real cluster."""

import importlib.util
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Callable

import pytest
from services import wait_until

from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
)
from pytest_mlhpc.provision.slurm.commands import CliClient
from pytest_mlhpc.provision.slurm.pyslurm import check_pyslurm, choose_client

pytestmark = pytest.mark.servers


#: The clients that may run here; whether pyslurm fits the cluster is known when that runs.
CLIENTS = ["cli", *(["pyslurm"] if importlib.util.find_spec("pyslurm") else [])]


@pytest.fixture(params=CLIENTS)
def client(request, slurm):
    if request.param == "pyslurm":
        trouble, _ = check_pyslurm(CliClient(), dict(os.environ))
        if trouble:
            pytest.skip(f"no pyslurm that fits the cluster: {trouble}")
    return choose_client(request.param, dict(os.environ))[0]


@pytest.fixture
def script(tmp_path) -> Callable[..., JobSubmission]:
    def write(*lines: str, options: str = "--partition=cpu", name: str = "") -> JobSubmission:
        name = name or f"mlhpc-{uuid.uuid4()}"
        path = tmp_path / f"{uuid.uuid4()}.sh"
        said = [f"#SBATCH {option}" for option in shlex.split(options)]
        head = ["#!/bin/bash", f'#SBATCH --job-name="{name}"', f"#SBATCH --output={path}.out", *said]
        path.write_text("\n".join([*head, "unset SLURM_EXPORT_ENV", *lines, ""]), encoding="utf-8")
        return JobSubmission(name, path, tmp_path)

    return write


def until(look):
    """Return the first true answer of *look*, asked again and again."""
    found = []
    assert wait_until(lambda: found.append(look()) or found[-1])
    return found[-1]


def ended(client, job):
    return until(lambda: next((it for it in client.jobs(ids=[job]) if it.state.ended), None))


def running(client, job, step=""):
    def look():
        (it,) = client.jobs(ids=[job])
        steps = [one.id for one in client.steps([job]).get(job, ())]
        return it if it.state is SchedulerState.RUNNING and (not step or step in steps) else None

    return until(look)


def test_a_job_that_completes_says_where_and_when(client, script):
    submission = script("exit 0", options="--partition=cpu --nodes=2 --time=3")
    before_s = int(time.time())
    job = ended(client, client.submit(submission))
    assert (job.state, job.exit_code, job.signal, job.name) == (
        SchedulerState.COMPLETED,
        0,
        0,
        submission.name,
    )
    assert (job.partition, job.node_count, len(job.nodes), job.time_limit_s) == ("cpu", 2, 2, 180.0)
    assert before_s <= job.submit_ns / 1e9 <= job.start_ns / 1e9 <= job.end_ns / 1e9 <= time.time()


@pytest.mark.parametrize(("line", "code", "signal"), [("exit 7", 7, 0), ("kill -9 $$", 0, 9)])
def test_a_job_that_fails_says_its_exit_code_or_signal(client, script, line, code, signal):
    job = ended(client, client.submit(script(line)))
    assert (job.state, job.exit_code, job.signal) == (SchedulerState.FAILED, code, signal)


def test_a_running_job_can_be_cancelled(client, script):
    job = client.submit(script("sleep 300"))
    running(client, job)
    client.cancel([job])
    assert ended(client, job).state is SchedulerState.CANCELLED


def test_a_held_job_waits_with_its_reason_and_can_be_cancelled(client, script):
    job = client.submit(script("true", options="--partition=cpu --hold"))
    held = until(lambda: next((it for it in client.jobs(ids=[job]) if it.reason), None))
    assert (held.state, held.state.pending, held.reason, held.nodes) == (
        SchedulerState.PENDING,
        True,
        "JobHeldUser",
        (),
    )
    assert job in {it.id for it in client.queue("cpu")}
    client.cancel([job])
    assert ended(client, job).state is SchedulerState.CANCELLED


def test_cancelling_what_has_ended_or_never_was_is_no_error(client, script):
    job = client.submit(script("true"))
    ended(client, job)
    client.cancel([job, "999999999", f"{job}.0", f"{job}.77"])
    client.cancel([job], "TERM")
    client.cancel([])


def test_a_step_gets_a_signal_and_keeps_its_own_exit_code(client, script, tmp_path):
    said = tmp_path / "said"
    step = f"trap 'echo term >{shlex.quote(str(said))}; exit 3' TERM; touch {shlex.quote(str(tmp_path / 'up'))}; sleep 300 & wait"
    # A job that ends kills what is left of its steps: it waits until the step has done what it does at a signal.
    waiting = f"for i in $(seq 300); do [ -s {shlex.quote(str(said))} ] && break; sleep 0.1; done"
    job = client.submit(script(f"srun bash -c {shlex.quote(step)}", waiting, "exit 9"))
    running(client, job, step="0")
    until((tmp_path / "up").exists)
    client.cancel([f"{job}.0"], "TERM")
    assert ended(client, job).exit_code == 9
    assert until(lambda: said.exists() and said.read_text()) == "term\n"


def test_running_steps_have_names_and_nodes(client, script):
    job = client.submit(script("srun --job-name='one | two' sleep 300", options="--partition=cpu --nodes=2"))
    it = running(client, job, step="0")
    steps = {step.id: step for step in client.steps([job])[job]}
    assert (steps["0"].name, steps["0"].nodes, steps["0"].state) == (
        "one | two",
        it.nodes,
        SchedulerState.RUNNING,
    )
    assert steps["batch"].nodes == it.nodes[:1]
    client.cancel([job])
    ended(client, job)


def test_the_accounting_has_the_job_and_each_step(client, script):
    job = client.submit(script("srun --job-name=good true", "srun --job-name=bad bash -c 'exit 5'", "exit 6"))
    ended(client, job)

    def look():
        return next(
            (it for it in client.accounting([job]) if it.state.ended and it.end_ns and len(it.steps) > 2),
            None,
        )

    found = until(look)
    steps = {step.id: step for step in found.steps}
    assert (found.state, found.exit_code, len(found.nodes)) == (SchedulerState.FAILED, 6, 1)
    assert (steps["0"].name, steps["0"].state) == ("good", SchedulerState.COMPLETED)
    assert (steps["1"].name, steps["1"].state, steps["1"].exit_code) == ("bad", SchedulerState.FAILED, 5)
    assert steps["1"].energy_j is None  # no plug-in of this cluster measures any


def test_many_jobs_are_asked_for_in_one_query(client, script):
    jobs = [client.submit(script("true", options="--partition=cpu --hold")) for _ in range(3)]
    before = sum(client.calls.values())
    many = [*jobs, *(str(number) for number in range(10**8, 10**8 + 2000))]
    assert {it.id for it in client.jobs(ids=many)} == set(jobs)
    assert sum(client.calls.values()) == before + 1
    client.cancel(jobs)


def test_jobs_are_found_by_name_and_by_user(client, script):
    submission = script("true", options="--partition=cpu --hold")
    job = client.submit(submission)
    assert [it.id for it in client.jobs(names=[submission.name, "no such job"])] == [job]
    assert job in {it.id for it in client.jobs(user="root")}
    assert job in {it.id for it in client.jobs(user=str(os.getuid()))}
    assert client.jobs(names=[submission.name], user="nobody") == []
    client.cancel([job])


def test_jobs_nobody_knows_are_not_in_the_answer(client):
    assert client.jobs(ids=["999999999"]) == []
    assert client.steps(["999999999"]) == {}
    assert client.accounting(["999999999"]) == []
    assert client.jobs(names=["no such job"]) == []


def test_another_job_with_a_hostile_name_does_not_disturb(client, script, tmp_path):
    name = "evil\nname\t\x1b[31m|x|é'\"%j%i"
    done = subprocess.run(
        ["sbatch", "--parsable", "--hold", "--partition=cpu", "--job-name", name, script("true").script],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    evil, ours = done.stdout.strip(), client.submit(script("true", options="--partition=cpu --hold"))
    found = {it.id: it.name for it in client.jobs(user="root")}
    assert found[evil] == name
    assert ours in found
    client.cancel([evil, ours])


@pytest.mark.parametrize("name", ["two words", "quo'te", "né", "a|b", "a,b", "%j"])
def test_a_job_is_found_by_an_odd_name(client, script, name):
    submission = script("true", options="--partition=cpu --hold", name=name)
    job = client.submit(submission)
    assert [(it.id, it.name) for it in client.jobs(names=[name]) if not it.state.ended] == [(job, name)]
    client.cancel([job])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--partition=nope", "invalid partition"),
        ("--partition=cpu --account=nope", "invalid account"),
        ("--partition=cpu --qos=nope", "invalid qos"),
        ("--partition=cpu --reservation=nope", "reservation"),
        ("--partition=cpu --nodelist=nope", "invalid node name"),
        ("--partition=cpu --constraint=nope", "invalid feature"),
        ("--partition=cpu --nodes=1 --mem=999G", "requested node configuration is not available"),
    ],
)
def test_a_refused_submission_has_slurms_message(client, script, options, words):
    with pytest.raises(SchedulerRefused) as caught:
        client.submit(script("true", options=options))
    assert words in str(caught.value).lower()


def test_environment_variables_of_the_user_change_nothing(slurm, script):
    environ = dict(os.environ) | {
        "SBATCH_PARTITION": "gpu", "SBATCH_HOLD": "1", "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "FAILED",
        "SACCT_FORMAT": "jobid", "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "elsewhere",
    }  # fmt: skip
    client = CliClient(environ)
    job = ended(client, client.submit(script("env", options="--partition=cpu")))
    assert (job.state, job.partition) == (SchedulerState.COMPLETED, "cpu")


def test_a_job_inherits_nothing_of_our_environment(slurm, script):
    submission = script("env")
    client = CliClient(dict(os.environ) | {"MY_SECRET": "swordfish"})
    ended(client, client.submit(submission))
    said = submission.script.with_name(submission.script.name + ".out").read_text()
    assert "SLURM_JOB_ID=" in said
    assert "swordfish" not in said
    assert "SLURM_TIME_FORMAT" not in said


def test_nodes_are_listed_with_what_they_have(client):
    nodes = {node.name: node for node in client.nodes()}
    assert set(nodes) == {"node1", "node2", "node3", "node4", "gpu1", "gpu2"}
    assert nodes["gpu1"].gres.startswith("gpu:")
    assert "gpu" in nodes["gpu2"].partitions
    assert nodes["node1"].usable
    assert nodes["node1"].memory > 1 << 30
    assert [node.name for node in client.nodes(["node2", "nope"])] == ["node2"]


def test_a_node_is_drained_with_our_reason_and_resumed(client):
    reason = """mlhpc: it's "slow" a=b State=DOWN"""
    client.drain(["node4"], reason)
    (node,) = client.nodes(["node4"])
    assert (node.usable, "drain" in node.flags, node.reason) == (False, True, reason)
    client.resume(["node4", "node3"])
    (node,) = client.nodes(["node4"])
    assert "drain" not in node.flags
    until(lambda: client.nodes(["node4"])[0].usable)


def test_partitions_have_their_limits(client):
    cpu = client.partition("cpu")
    assert (cpu.up, cpu.total_nodes, cpu.nodes) == (True, 4, ("node1", "node2", "node3", "node4"))
    assert cpu.max_time_s is None or cpu.max_time_s > 0
    with pytest.raises(SchedulerRefused, match="nope"):
        client.partition("nope")


def test_a_qos_has_limits_or_is_not_known(client):
    assert client.qos("normal").usage_factor == 1.0
    assert client.qos("nope") is None


def test_reservations_are_listed(client):
    assert client.reservations() == []


def test_the_version_is_that_of_the_cluster(client):
    assert client.version().split(".")[0].isdecimal()


@pytest.mark.parametrize(
    "hostlist",
    ["node[1-4]", "node1,gpu[1-2]", "n[08-11]", "n[8-011]", "a[01-02,3,7-8]", "rack[1-2]node[01-03]", "b,a,b", "n[00008-10]", "a[1-2]b[3-4]c[5-6]", "a[1-2]b[3-4]c[5-6]d[7-8]"],
)  # fmt: skip
def test_host_lists_expand_as_slurm_expands_them(client, hostlist):
    done = subprocess.run(
        ["scontrol", "show", "hostnames", hostlist], capture_output=True, text=True, check=True, timeout=600
    )
    assert client.expand(hostlist) == tuple(done.stdout.split())


def test_without_slurmdbd_the_completed_jobs_are_accounted(own_slurm, script):
    client = CliClient()
    job = client.submit(script("exit 7"))
    ended(client, job)
    (found,) = until(lambda: client.accounting([job]))
    assert (found.id, found.state, found.nodes != ()) == (job, SchedulerState.FAILED, True)
    assert client.qos("normal") is None


def test_without_any_accounting_that_is_said(start_own_slurm, script):
    start_own_slurm("--accounting", "none")
    with pytest.raises(SchedulerUnavailable, match="accounting storage is disabled"):
        CliClient().accounting(["1"])


def test_with_the_controller_down_nobody_answers(own_slurm, script):
    own_slurm.stop_controller()
    client = CliClient()
    with pytest.raises(SchedulerUnavailable, match=r"(?i)unable to contact slurm controller"):
        client.submit(script("true"))
    with pytest.raises(SchedulerUnavailable, match=r"(?i)unable to contact slurm controller"):
        client.jobs(ids=["1"])
    own_slurm.start_controller()
    assert client.nodes()


@pytest.mark.slow
def test_a_job_beyond_its_time_limit_says_so(client, script):
    job = client.submit(script("sleep 300", options="--partition=cpu --time=1"))
    found = until(lambda: next((it for it in client.jobs(ids=[job]) if it.state.ended), None))
    assert (found.state, found.reason) == (SchedulerState.TIMEOUT, "TimeLimit")
