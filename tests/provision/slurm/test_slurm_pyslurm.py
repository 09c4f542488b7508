"""The choice of a client by a real probe, and every call of pyslurm against its own source distribution's names and signatures."""

from __future__ import annotations

import json
import os
import re
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyslurm_standin import API, Collection, filled, standin

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
)
from pytest_mlhpc.provision.slurm.pyslurm import (
    PyslurmClient,
    UnsupportedOptionError,
    choose_client,
    probe_pyslurm,
    release_of,
    submit_attributes,
)

GOOD = """
import types
__version__ = "22.5.3"
slurmctld = types.SimpleNamespace(ping_primary=lambda: None)
"""


@pytest.fixture
def environ_with(tmp_path, monkeypatch, command):
    """Put a module pyslurm and a command sinfo where the probe and the client look first; return the environment."""

    def make(module, version="slurm 22.05.8"):
        (tmp_path / "pyslurm.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "pyslurm", raising=False)
        return {**os.environ, **command("sinfo", f"echo '{version}'"), "PYTHONPATH": str(tmp_path)}

    return make


def test_commands_are_used_without_a_look_at_pyslurm(environ_with):
    client, line = choose_client("cli", environ_with("raise SystemExit(1)"))
    assert (client.name, line) == ("cli", "")


@pytest.mark.parametrize("setting", ["auto", "pyslurm"])
def test_pyslurm_of_the_clusters_release_is_used(environ_with, setting):
    client, line = choose_client(setting, environ_with(GOOD))
    assert (client.name, line) == ("pyslurm", "slurm: pyslurm 22.5.3 is used")


@pytest.mark.parametrize(
    ("module", "version", "why"),
    [
        ("raise ImportError('libslurm.so is missing')", "slurm 22.05.8", "libslurm.so is missing"),
        ("raise SystemExit(1)", "slurm 22.05.8", "exit code 1"),
        ("import os; os.kill(os.getpid(), 11)", "slurm 22.05.8", "killed by SIGSEGV"),
        (GOOD + "def f(): raise OSError('no controller')\nslurmctld.ping_primary = f", "slurm 22.05.8", "no controller"),
        (GOOD, "slurm-wlm 24.11.5", "pyslurm 22.5.3 is not for Slurm 24.11.5"),
        ("import os; os._exit(0)", "slurm 22.05.8", "its probe said ''"),
        (GOOD, "", "holds no version"),
    ],
)  # fmt: skip
def test_otherwise_auto_says_why_not_and_pyslurm_fails(environ_with, module, version, why):
    environ = environ_with(module, version)
    client, line = choose_client("auto", environ)
    assert client.name == "cli"
    text = f"slurm: Slurm's commands are used, not pyslurm: .*{re.escape(why)}.*"
    assert re.fullmatch(text, line)  # in one line
    with pytest.raises(UsageError, match=f"'pyslurm' cannot be used.*{re.escape(why)}"):
        choose_client("pyslurm", environ)


def test_a_probe_that_hangs_is_ended(environ_with):
    probe = probe_pyslurm(environ_with("import time; time.sleep(600)"), limit_s=0.2)
    assert probe.trouble.startswith("its probe: no answer from ")


def test_an_unknown_setting_is_refused():
    with pytest.raises(UsageError, match="there are cli, auto and pyslurm"):
        choose_client("rest", {})


@pytest.mark.parametrize(
    ("version", "expected"), [("22.5.3", (22, 5)), ("22.05.8", (22, 5)), ("24.11.0", (24, 11)), ("new", None)]
)
def test_releases_are_compared_as_numbers(version, expected):
    assert release_of(version) == expected


RECORDS = json.loads((Path(__file__).parent / "pyslurm_records.json").read_text())


@pytest.fixture
def slurm(monkeypatch):
    """The module, our client on it, the calls of it so far, and what they return, to be filled by the test.

    ``record`` is an object of the file of records, with what is changed in it.
    """
    answers = {}
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
        lines = [f"#SBATCH {option}\n" for option in options]
        script.write_text("".join(["#!/bin/bash\n", *lines, "true\n"]))
        return JobSubmission("x", script, tmp_path)

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
    asked = json.loads(Path(__file__).with_name("pyslurm_submission.json").read_text())
    written = submission(*asked["options"])
    assert slurm.client.submit(written) == "12"
    environment = {"SLURM_GET_USER_ENV": "1", "PATH": "/nonexistent"}
    ours = {"working_directory": str(tmp_path), "script": str(written.script), "environment": environment}
    assert slurm.calls == [("JobSubmitDescription.submit", {}, {**asked["attributes"], **ours})]


@pytest.mark.parametrize(
    "option",
    ["--mem=0", "--uenv=x", "--tres-per-node=a:1", "--export=ALL", "--ntasks=x", "--gres=a:b:c:1", "-Z", "word"],
)  # fmt: skip
def test_what_pyslurm_cannot_say_goes_to_sbatch(slurm, submission, option):
    with pytest.raises(UnsupportedOptionError):
        submit_attributes(f"#!/bin/sh\n#SBATCH {option}\n", {})
    with pytest.raises(SchedulerUnavailable, match="'sbatch' is not on PATH"):
        slurm.client.submit(submission(option))
    assert slurm.calls == []


def test_options_end_where_the_script_begins():
    assert (
        submit_attributes("#!/bin/sh\n# x\n#SBATCH -N 2\n#SBATCH -pcpu\ntrue\n#SBATCH -N 9\n", {})["nodes"]
        == "2"
    )


@pytest.mark.parametrize(
    ("function", "words", "call", "error"),
    [
        pytest.param(
            "JobSubmitDescription.submit", "Invalid partition name specified",
            lambda client, submission: client.submit(submission("--partition=nope")), SchedulerRefused, id="a refusal",
        ),
        pytest.param(
            "Jobs.load", "Unable to contact slurm controller (connect failure)", lambda client, _: client.jobs(ids=["1"]),
            SchedulerUnavailable, id="a controller that is down refuses nothing",
        ),
        pytest.param(
            "db.Jobs.load", "Failed to get Jobs from slurmdbd", lambda client, _: client.accounting(["7"]), SchedulerUnavailable,
            id="no accounting is no refusal",
        ),
        pytest.param(
            "Job.cancel", "Access/permission denied", lambda client, _: client.cancel(["7"]), SchedulerRefused,
            id="a job of somebody else",
        ),
    ],
)  # fmt: skip
def test_an_error_has_slurms_words_and_says_whose_fault_it_is(
    slurm, submission, function, words, *, call, error
):
    slurm.answers[function] = slurm.module.RPCError(words)
    with pytest.raises(error, match=f"^pyslurm .*{re.escape(words)}"):
        call(slurm.client, submission)


def test_what_has_ended_is_cancelled_without_error(slurm):
    slurm.answers["Job.cancel"] = slurm.module.RPCError("Invalid job id specified")
    slurm.client.cancel(["7"])
    assert [name for name, _, _ in slurm.calls] == ["Job.cancel"]


@pytest.fixture
def jobs(slurm):
    """Slurm knows three jobs."""
    found = [slurm.record(name) for name in ("failed", "pending", "pending elsewhere")]
    slurm.answers["Jobs.load"] = Collection({job.id: job for job in found})


@pytest.mark.parametrize(
    ("function", "answer", "query", "expected"),
    [
        pytest.param(
            "Jobs.load",
            lambda slurm: Collection({7: slurm.record("failed"), 8: slurm.record("pending")}),
            lambda client: client.jobs(ids=["7", "99"]),
            {
                "state": SchedulerState.FAILED,
                "exit_code": 7,
                "nodes": ("node1", "node2"),
                "restarts": 1,
                "submit_ns": 10**9,
                "end_ns": 3 * 10**9,
                "time_limit_s": 600.0,
            },
            id="jobs",
        ),
        pytest.param(
            "Nodes.load",
            lambda slurm: Collection(node1=slurm.record("node1"), node2=slurm.record("node2")),
            lambda client: client.nodes(["node1", "nope"]),
            {"state": "idle", "flags": {"drain"}, "gres": "gpu:h100:4", "memory": 2000 << 20},
            id="nodes",
        ),
        pytest.param(
            "Partition.load",
            lambda slurm: slurm.record("cpu"),
            lambda client: [client.partition("cpu")],
            {
                "up": True,
                "max_time_s": 3600.0,
                "max_nodes": None,
                "total_nodes": 4,
                "allow_accounts": frozenset(),
                "allow_qos": {"normal"},
            },
            id="limits of a partition",
        ),
        pytest.param(
            "Reservations.load",
            lambda slurm: Collection(
                m=slurm.record(
                    "maintenance",
                    flags=slurm.module.ReservationFlags.MAINTENANCE | slurm.module.ReservationFlags.FLEX,
                )
            ),
            lambda client: client.reservations(),
            {"name": "m", "flags": {"MAINT"}, "users": {"root"}, "end_ns": 2 * 10**9},
            id="times, users and flags of a reservation",
        ),
    ],
)
def test_one_call_tells_of(slurm, function, answer, query, expected):
    slurm.answers[function] = answer(slurm)
    (found,) = query(slurm.client)
    assert {name: getattr(found, name) for name in expected} == expected
    assert slurm.client.calls == {function: 1}


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
    assert (found.state, only.state) == (SchedulerState.CANCELLED, SchedulerState.OUT_OF_MEMORY)
    assert (only.signal, only.energy_j) == (125, 500.0)
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
    with pytest.raises(SchedulerRefused, match="no job or step"):
        slurm.client.cancel(["--all"])


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
    assert len(slurm.client.nodes()) == 2
    change(slurm.client)
    calls = [(values["name"], arguments) for name, arguments, values in slurm.calls if name == "Node.modify"]
    assert [(name, vars(arguments["changes"])) for name, arguments in calls] == modified


def test_limits_of_a_qos_are_asked_of_the_commands(slurm):
    assert (slurm.client.qos("normal"), slurm.client.calls["sacctmgr"]) == (None, 1)
    assert slurm.client.expand("n[1-2]") == ("n1", "n2")
