"""Every call that we make of pyslurm, against the names and signatures of its own source distribution."""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyslurm_standin import API, Collection, filled, standin

from pytest_mlhpc.provision.slurm.client import SlurmRefused, SlurmUnavailable, State, Submission
from pytest_mlhpc.provision.slurm.pyslurm_client import PyslurmClient
from pytest_mlhpc.provision.slurm.pyslurm_options import CannotSayError, attributes

RECORDS = json.loads((Path(__file__).parent / "pyslurm_records.json").read_text())


@pytest.fixture
def slurm(monkeypatch) -> SimpleNamespace:
    """The module, our client on it, the calls of it so far, and what they return, to be filled by the test.

    ``record`` is an object of the file of records, with what is changed in it.
    """
    answers: dict = {}
    module, calls = standin(answers)
    monkeypatch.setitem(sys.modules, "pyslurm", module)

    def record(name, **changes):
        kind, values = RECORDS[name]
        return filled(attrgetter(kind)(module), **values, **changes)

    client = PyslurmClient({"PATH": "/nonexistent"})
    return SimpleNamespace(module=module, client=client, calls=calls, answers=answers, record=record)


@pytest.fixture
def submission(tmp_path):
    def write(*options):
        script = tmp_path / "job.sh"
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true", ""]
        script.write_text("\n".join(lines))
        return Submission("x", script, tmp_path)

    return write


def test_the_standin_refuses_what_pyslurm_does_not_have(slurm):
    with pytest.raises(AttributeError, match="partition"):
        slurm.module.JobSubmitDescription(partition="cpu")
    with pytest.raises(AttributeError):
        filled(slurm.module.Job).nodelist  # noqa: B018 - the look itself is the test
    with pytest.raises(TypeError):
        slurm.module.Job.load()
    assert API["version"] == "25.11.2"


def test_a_script_is_submitted_with_the_attributes_of_its_lines(slurm, submission, tmp_path):
    slurm.answers["JobSubmitDescription.submit"] = 12
    written = submission(
        '--job-name="two words"', "--partition=cpu,low", "--qos=normal", "--account=bench", "--nodes=2", "--time=90",
        "--ntasks-per-node=4", "--cpus-per-task=2", "--gres=gpu:h100:4", "--exclude=node[1-2],x", "--exclusive", "--mem=4096M",
        '--output="/a b/%j \\"q\\".out"', "--no-requeue", "--export=NONE", "--open-mode=append", "--reservation=maint42",
    )  # fmt: skip
    assert slurm.client.submit(written) == "12"
    ((function, _, values),) = slurm.calls
    assert function == "JobSubmitDescription.submit"
    assert values == {
        "name": "two words", "partitions": ["cpu", "low"], "qos": "normal", "account": "bench", "nodes": "2",
        "time_limit": 90, "ntasks_per_node": 4, "cpus_per_task": 2, "gres_per_node": {"gpu:h100": 4},
        "excluded_nodes": ["node1", "node2", "x"], "resource_sharing": "no", "memory_per_node": "4096M",
        "standard_output": '/a b/%j "q".out', "is_requeueable": False, "log_files_open_mode": "append",
        "reservations": ["maint42"], "working_directory": str(tmp_path), "script": str(written.script),
        "environment": {"SLURM_GET_USER_ENV": "1", "PATH": "/nonexistent"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "option",
    ["--mem=0", "--uenv=x", "--tres-per-node=a:1", "--export=ALL", "--ntasks=x", "--gres=a:b:c:1", "-Z", "word"],
)  # fmt: skip
def test_what_pyslurm_cannot_say_goes_to_sbatch(slurm, submission, option):
    with pytest.raises(CannotSayError):
        attributes(f"#!/bin/sh\n#SBATCH {option}\n", {})
    with pytest.raises(SlurmUnavailable, match="'sbatch' is not on PATH"):
        slurm.client.submit(submission(option))
    assert slurm.calls == []


def test_options_end_where_the_script_begins():
    assert attributes("#!/bin/sh\n# x\n#SBATCH -N 2\n#SBATCH -pcpu\ntrue\n#SBATCH -N 9\n", {})["nodes"] == "2"


@pytest.mark.parametrize(
    ("failing", "call", "error"),
    [
        pytest.param(
            ("JobSubmitDescription.submit", "Invalid partition name specified"),
            lambda client, submission: client.submit(submission("--partition=nope")), SlurmRefused, id="a refusal",
        ),
        pytest.param(
            ("Jobs.load", "Unable to contact slurm controller (connect failure)"), lambda client, _: client.jobs(ids=["1"]),
            SlurmUnavailable, id="a controller that is down refuses nothing",
        ),
        pytest.param(
            ("db.Jobs.load", "Failed to get Jobs from slurmdbd"), lambda client, _: client.accounting(["7"]), SlurmUnavailable,
            id="no accounting is no refusal",
        ),
        pytest.param(
            ("Job.cancel", "Access/permission denied"), lambda client, _: client.cancel(["7"]), SlurmRefused,
            id="a job of somebody else",
        ),
    ],
)  # fmt: skip
def test_an_error_has_slurms_words_and_says_whose_fault_it_is(slurm, submission, failing, call, error):
    function, words = failing
    slurm.answers[function] = slurm.module.RPCError(words)
    with pytest.raises(error) as caught:
        call(slurm.client, submission)
    assert str(caught.value).startswith("pyslurm ")
    assert words in str(caught.value)


def test_what_has_ended_is_cancelled_without_error(slurm):
    slurm.answers["Job.cancel"] = slurm.module.RPCError("Invalid job id specified")
    slurm.client.cancel(["7"])
    assert [name for name, _, _ in slurm.calls] == ["Job.cancel"]


@pytest.fixture
def jobs(slurm):
    """Slurm knows three jobs."""
    found = [slurm.record(name) for name in ("failed", "pending", "pending elsewhere")]
    slurm.answers["Jobs.load"] = Collection({job.id: job for job in found})


def test_jobs_come_from_one_call(slurm, jobs):
    (found,) = slurm.client.jobs(ids=["7", "99"])
    assert (found.state, found.exit_code, found.nodes) == (State.FAILED, 7, ("node1", "node2"))
    assert (found.restarts, found.submit_ns, found.end_ns) == (1, 10**9, 3 * 10**9)
    assert found.time_limit_s == 600.0
    assert slurm.client.calls["Jobs.load"] == 1


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        (lambda client: client.jobs(names=["x"]), ["8"]),
        (lambda client: client.jobs(user="ann"), ["7"]),
        (lambda client: client.jobs(user="1000"), ["7"]),
        (lambda client: client.jobs(names=["x"], user="ann"), []),
        (lambda client: client.queue("cpu"), ["8"]),
    ],
    ids=["by name", "by user", "by number of the user", "by name and user", "waiting in a partition"],
)
def test_jobs_are_found(slurm, jobs, query, ids):
    assert [job.id for job in query(slurm.client)] == ids


def test_the_accounting_has_steps(slurm):
    step = slurm.record("step out of memory", stats=slurm.record("energy"))
    slurm.answers["db.Jobs.load"] = Collection({7: slurm.record("accounted", steps={0: step})})
    (found,) = slurm.client.accounting(["7"])
    (only,) = found.steps
    assert found.state is State.CANCELLED
    assert (only.state, only.signal, only.energy_j) == (State.OUT_OF_MEMORY, 125, 500.0)
    assert slurm.calls[0][1]["db_filter"].ids == [7]


def test_steps_of_all_jobs_come_from_one_call(slurm):
    step = slurm.record("batch step")
    slurm.answers["JobSteps.load_all"] = {7: {"batch": step}, 8: {0: step}}
    found = slurm.client.steps(["7"])
    assert {job: [step.id for step in steps] for job, steps in found.items()} == {"7": ["batch"]}
    assert len(slurm.calls) == 1


def test_jobs_and_steps_are_cancelled_or_signalled(slurm):
    slurm.client.cancel(["7", "7.0", "7.batch"])
    slurm.client.cancel(["7", "7.0"], "TERM")
    assert [(name, dict(arguments), values.get("id")) for name, arguments, values in slurm.calls] == [
        ("Job.cancel", {}, 7), ("JobStep.cancel", {}, 0), ("JobStep.cancel", {}, "batch"),
        ("Job.send_signal", {"signal": "SIGTERM"}, 7), ("JobStep.send_signal", {"signal": "SIGTERM"}, 0),
    ]  # fmt: skip
    with pytest.raises(SlurmRefused, match="no job or step"):
        slurm.client.cancel(["--all"])


def test_nodes_are_listed(slurm):
    slurm.answers["Nodes.load"] = Collection(node1=slurm.record("node1"), node2=slurm.record("node2"))
    (found,) = slurm.client.nodes(["node1", "nope"])
    assert (found.state, found.flags, found.gres) == ("idle", {"drain"}, "gpu:h100:4")
    assert found.memory == 2000 << 20
    assert len(slurm.client.nodes()) == 2


@pytest.mark.parametrize(
    ("change", "modified"),
    [
        (lambda client: client.drain(["node2"], "it's\nslow"), [("node2", {"state": "DRAIN", "reason": "it's slow"})]),
        (lambda client: client.resume(["node1", "node2"]), [("node1", {"state": "RESUME"})]),
    ],
    ids=["drained", "resumed, where they are drained"],
)  # fmt: skip
def test_nodes_are(slurm, change, modified):
    slurm.answers["Nodes.load"] = Collection(node1=slurm.record("node1"), node2=slurm.record("node2"))
    change(slurm.client)
    calls = [(values["name"], arguments) for name, arguments, values in slurm.calls if name == "Node.modify"]
    assert [(name, vars(arguments["changes"])) for name, arguments in calls] == modified


def test_a_partition_has_its_limits(slurm):
    slurm.answers["Partition.load"] = slurm.record("cpu")
    limits = slurm.client.partition("cpu")
    assert (limits.up, limits.max_time_s, limits.max_nodes, len(limits.nodes)) == (True, 3600.0, None, 4)
    assert (limits.allow_accounts, limits.allow_qos) == (frozenset(), {"normal"})


def test_a_reservation_has_times_users_and_flags(slurm):
    flags = slurm.module.ReservationFlags.MAINTENANCE | slurm.module.ReservationFlags.FLEX
    slurm.answers["Reservations.load"] = Collection(m=slurm.record("maintenance", flags=flags))
    (found,) = slurm.client.reservations()
    assert (found.name, found.flags, found.users, found.end_ns) == ("m", {"MAINT"}, {"root"}, 2 * 10**9)


def test_limits_of_a_qos_are_asked_of_the_commands(slurm):
    assert slurm.client.qos("normal") is None
    assert slurm.client.calls["sacctmgr"] == 1
    assert slurm.client.expand("n[1-2]") == ("n1", "n2")
