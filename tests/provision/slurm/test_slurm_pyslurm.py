"""Every call that we make of pyslurm, against the names and signatures of its own source distribution."""

from __future__ import annotations

import sys

import pytest
from pyslurm_standin import API, Collection, filled, standin

from pytest_mlhpc.provision.slurm.client import SlurmRefused, SlurmUnavailable, State, Submission
from pytest_mlhpc.provision.slurm.pyslurm_client import PyslurmClient
from pytest_mlhpc.provision.slurm.pyslurm_options import CannotSayError, attributes


@pytest.fixture
def world(monkeypatch):
    def make(answers=None):
        answers = {} if answers is None else answers
        module, calls = standin(answers)
        monkeypatch.setitem(sys.modules, "pyslurm", module)
        return module, PyslurmClient({"PATH": "/nonexistent"}), calls

    return make


@pytest.fixture
def submission(tmp_path):
    def write(*options):
        script = tmp_path / "job.sh"
        script.write_text(
            "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true", ""])
        )
        return Submission("x", script, tmp_path)

    return write


def test_the_standin_refuses_what_pyslurm_does_not_have(world):
    module, _, _ = world()
    with pytest.raises(AttributeError, match="partition"):
        module.JobSubmitDescription(partition="cpu")
    with pytest.raises(AttributeError):
        filled(module.Job).nodelist  # noqa: B018 - the look itself is the test
    with pytest.raises(TypeError):
        module.Job.load()
    assert API["version"] == "25.11.2"


def test_a_script_is_submitted_with_the_attributes_of_its_lines(world, submission, tmp_path):
    _, client, calls = world({"JobSubmitDescription.submit": 12})
    wanted = submission(
        '--job-name="two words"', "--partition=cpu,low", "--qos=normal", "--account=bench", "--nodes=2", "--time=90",
        "--ntasks-per-node=4", "--cpus-per-task=2", "--gres=gpu:h100:4", "--exclude=node[1-2],x", "--exclusive", "--mem=4096M",
        '--output="/a b/%j \\"q\\".out"', "--no-requeue", "--export=NONE", "--open-mode=append", "--reservation=maint42",
    )  # fmt: skip
    assert client.submit(wanted) == "12"
    ((function, _, values),) = calls
    assert function == "JobSubmitDescription.submit"
    assert values == {
        "name": "two words", "partitions": ["cpu", "low"], "qos": "normal", "account": "bench", "nodes": "2",
        "time_limit": 90, "ntasks_per_node": 4, "cpus_per_task": 2, "gres_per_node": {"gpu:h100": 4},
        "excluded_nodes": ["node1", "node2", "x"], "resource_sharing": "no", "memory_per_node": "4096M",
        "standard_output": '/a b/%j "q".out', "is_requeueable": False, "log_files_open_mode": "append",
        "reservations": ["maint42"], "working_directory": str(tmp_path), "script": str(wanted.script),
        "environment": {"SLURM_GET_USER_ENV": "1", "PATH": "/nonexistent"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [
        "--mem=0",
        "--uenv=x",
        "--tres-per-node=a:1",
        "--export=ALL",
        "--ntasks=x",
        "--gres=a:b:c:1",
        "-Z",
        "word",
    ],
)
def test_what_pyslurm_cannot_say_goes_to_sbatch(world, submission, option):
    _, client, calls = world()
    with pytest.raises(CannotSayError):
        attributes(f"#!/bin/sh\n#SBATCH {option}\n", {})
    with pytest.raises(SlurmUnavailable, match="'sbatch' is not on PATH"):
        client.submit(submission(option))
    assert calls == []


def test_options_end_where_the_script_begins():
    assert attributes("#!/bin/sh\n# x\n#SBATCH -N 2\n#SBATCH -pcpu\ntrue\n#SBATCH -N 9\n", {})["nodes"] == "2"


def test_a_refusal_is_in_slurms_words(world, submission):
    answers = {}
    module, client, _ = world(answers)
    answers["JobSubmitDescription.submit"] = module.RPCError("Invalid partition name specified")
    with pytest.raises(SlurmRefused, match="pyslurm submit: Invalid partition name specified"):
        client.submit(submission("--partition=nope"))


def test_a_controller_that_is_down_is_no_refusal(world):
    answers = {}
    module, client, _ = world(answers)
    answers["Jobs.load"] = module.RPCError("Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        client.jobs(ids=["1"])


def test_jobs_come_from_one_call(world):
    answers = {}
    module, client, _ = world(answers)
    job = filled(
        module.Job, id=7, name="a|b", user_name="ann", user_id=1000, state="FAILED", state_reason="NonZeroExitCode",
        partition="cpu", account="bench", allocated_nodes="node[1-2]", num_nodes=2, time_limit=10, priority=5,
        requeue_count=1, submit_time=1, start_time=2, end_time=3, exit_code=7, exit_code_signal=0,
    )  # fmt: skip
    other = filled(module.Job, id=8, name="x", user_id=5, state="PENDING", partition="low,cpu", priority=3)
    answers["Jobs.load"] = Collection({7: job, 8: other})
    (found,) = client.jobs(ids=["7", "99"])
    assert (found.state, found.exit_code, found.nodes, found.time_limit_s) == (
        State.FAILED,
        7,
        ("node1", "node2"),
        600.0,
    )
    assert (found.restarts, found.submit_ns, found.end_ns) == (1, 10**9, 3 * 10**9)
    assert [it.id for it in client.jobs(names=["x"])] == ["8"]
    assert [it.id for it in client.jobs(user="ann")] == [it.id for it in client.jobs(user="1000")] == ["7"]
    assert client.jobs(names=["x"], user="ann") == []
    assert [it.id for it in client.queue("cpu")] == ["8"]
    assert client.calls["Jobs.load"] == 6


def test_the_accounting_has_steps(world):
    answers = {}
    module, client, calls = world(answers)
    stats = filled(module.db.JobStepStatistics, consumed_energy=500)
    step = filled(
        module.db.JobStep, id=0, name="s", state="OUT_OF_MEMORY", exit_code=0, exit_code_signal=125, nodelist="node1",
        start_time=1, end_time=2, stats=stats,
    )  # fmt: skip
    job = filled(
        module.db.Job, id=7, state="CANCELLED", nodelist="node1", time_limit=1, steps={0: step}, user_id=0
    )
    answers["db.Jobs.load"] = Collection({7: job})
    (found,) = client.accounting(["7"])
    assert (found.state, found.steps[0].state, found.steps[0].signal) == (
        State.CANCELLED,
        State.OUT_OF_MEMORY,
        125,
    )
    assert found.steps[0].energy_j == 500.0
    assert calls[0][1]["db_filter"].ids == [7]


def test_no_accounting_is_no_refusal(world):
    answers = {}
    module, client, _ = world(answers)
    answers["db.Jobs.load"] = module.RPCError("Failed to get Jobs from slurmdbd")
    with pytest.raises(SlurmUnavailable):
        client.accounting(["7"])


def test_steps_of_all_jobs_come_from_one_call(world):
    answers = {}
    module, client, _ = world(answers)
    step = filled(
        module.JobStep, id="batch", name="batch", state="RUNNING", allocated_nodes="node1", start_time=4
    )
    answers["JobSteps.load_all"] = {7: {"batch": step}, 8: {0: step}}
    assert list(client.steps(["7"])) == ["7"]
    assert client.steps(["7"])["7"][0].id == "batch"


def test_jobs_and_steps_are_cancelled_or_signalled(world):
    _, client, calls = world()
    client.cancel(["7", "7.0", "7.batch"])
    client.cancel(["7", "7.0"], "TERM")
    assert [(name, dict(arguments), values.get("id")) for name, arguments, values in calls] == [
        ("Job.cancel", {}, 7), ("JobStep.cancel", {}, 0), ("JobStep.cancel", {}, "batch"),
        ("Job.send_signal", {"signal": "SIGTERM"}, 7), ("JobStep.send_signal", {"signal": "SIGTERM"}, 0),
    ]  # fmt: skip
    with pytest.raises(SlurmRefused, match="no job or step"):
        client.cancel(["--all"])


def test_what_has_ended_is_cancelled_without_error(world):
    answers = {}
    module, client, _ = world(answers)
    answers["Job.cancel"] = module.RPCError("Invalid job id specified")
    client.cancel(["7"])
    answers["Job.cancel"] = module.RPCError("Access/permission denied")
    with pytest.raises(SlurmRefused, match="denied"):
        client.cancel(["7"])


def test_nodes_are_listed_drained_and_resumed(world):
    answers = {}
    module, client, calls = world(answers)
    one = filled(
        module.Node, name="node1", state="IDLE+DRAIN", reason="slow", real_memory=2000, total_cpus=4, address="a", hostname="h",
        configured_gres={"gpu:h100": 4}, available_features=["gpu"], partitions=["cpu", "low"],
    )  # fmt: skip
    two = filled(module.Node, name="node2", state="MIXED")
    answers["Nodes.load"] = Collection(node1=one, node2=two)
    (found,) = client.nodes(["node1", "nope"])
    assert (found.state, found.flags, found.gres, found.memory) == (
        "idle",
        {"drain"},
        "gpu:h100:4",
        2000 << 20,
    )
    assert len(client.nodes()) == 2
    calls.clear()
    client.drain(["node2"], "it's\nslow")
    client.resume(["node1", "node2"])
    changes = [
        (values["name"], vars(arguments["changes"]))
        for name, arguments, values in calls
        if name == "Node.modify"
    ]
    assert changes == [
        ("node2", {"state": "DRAIN", "reason": "it's slow"}), ("node1", {"state": "RESUME"}),
    ]  # fmt: skip


def test_partitions_and_reservations_are_told(world):
    answers = {}
    module, client, _ = world(answers)
    answers["Partition.load"] = filled(
        module.Partition, name="cpu", state="UP", max_time=60, max_nodes="UNLIMITED", total_nodes=4, nodes="node[1-4]",
        allowed_accounts=["ALL"], allowed_qos=["normal"],
    )  # fmt: skip
    limits = client.partition("cpu")
    assert (limits.up, limits.max_time_s, limits.max_nodes, len(limits.nodes)) == (True, 3600.0, None, 4)
    assert (limits.allow_accounts, limits.allow_qos) == (frozenset(), {"normal"})
    flags = module.ReservationFlags.MAINTENANCE | module.ReservationFlags.FLEX
    answers["Reservations.load"] = Collection(
        m=filled(
            module.Reservation, name="m", start_time=1, end_time=2, nodes="node1", users=["root"], flags=flags
        )
    )
    (found,) = client.reservations()
    assert (found.name, found.flags, found.users, found.end_ns) == ("m", {"MAINT"}, {"root"}, 2 * 10**9)


def test_limits_of_a_qos_are_asked_of_the_commands(world):
    _, client, _ = world()
    assert client.qos("normal") is None
    assert client.calls["sacctmgr"] == 1
    assert client.expand("n[1-2]") == ("n1", "n2")
