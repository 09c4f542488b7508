"""A job's hosts as its scheduler tells them, and the words that start an agent on another one."""

import os
import sys

import pytest

from pytest_mlhpc.node.agents.nodes import NodesUnknown
from pytest_mlhpc.node.batch.job_nodes import job_hosts, own_host, start_argv
from pytest_mlhpc.node.batch.pod_hub import SHARED, PlaceUnknown, take_environment
from pytest_mlhpc.node.protocol.plan import JobRules

HERE = os.uname().nodename
RULES = JobRules("Grid Engine", "JOB_ID", "PE_HOSTFILE", True, r"^(?P<host>\S+)\s", ("qrsh", "{host}"))


@pytest.fixture
def hosts(tmp_path):
    """Return the hosts of a job whose file has this content."""

    def found(text):
        (tmp_path / "hosts").write_text(text)
        return job_hosts(RULES, {"PE_HOSTFILE": str(tmp_path / "hosts")})

    return found


def test_this_host_is_the_first_and_each_is_there_once(hosts):
    text = (
        f"other 4 all.q@other UNDEFINED\n{HERE} 4 all.q@{HERE} UNDEFINED\nother 4 short.q@other UNDEFINED\n"
    )
    assert hosts(text) == (HERE, "other")


def test_a_job_without_a_list_has_this_host_alone():
    assert job_hosts(RULES, {}) == (HERE,)


def test_hosts_may_stand_in_a_variable():
    rules = JobRules("LSF", "LSB_JOBID", "LSB_HOSTS", False, r"(?P<host>\S+)")
    assert job_hosts(rules, {"LSB_HOSTS": f"a {HERE} a"}) == (HERE, "a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "matches nothing in"),
        ("\n\n", "matches nothing in"),
        ("other 1 all.q\n", "is none of those in .*: other"),
    ],
)
def test_hosts_that_cannot_be_told_are_refused(hosts, text, words):
    with pytest.raises(NodesUnknown, match=words):
        hosts(text)


def test_a_file_of_hosts_that_is_gone_is_named():
    with pytest.raises(NodesUnknown, match=r"/nowhere \(PE_HOSTFILE\) cannot be read: No such file"):
        job_hosts(RULES, {"PE_HOSTFILE": "/nowhere"})


def test_a_host_is_known_by_its_name_without_domain_and_by_its_address():
    assert (
        own_host(["other", f"{HERE.partition('.')[0]}.example.org"])
        == f"{HERE.partition('.')[0]}.example.org"
    )
    assert own_host(["192.0.2.1"]) == ""


def test_an_agent_is_started_without_a_shell():
    argv = start_argv(("qrsh", "-inherit", "{host}"), "node2", {"A": "1"}, "/work/plan.json")
    assert argv == [
        "qrsh", "-inherit", "node2", "env", "A=1", sys.executable, "-m", "pytest_mlhpc.node.batch.pod", "/work/plan.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/work/my folder/plan.json", "/work/$(x)/plan.json", "/work/a;b", "/work/a'b"]
)
def test_what_a_remote_shell_could_change_is_refused(path):
    with pytest.raises(ValueError, match="holds a character that a shell may change"):
        start_argv(("ssh", "{host}"), "node2", {}, path)


def test_an_agent_takes_the_environment_of_the_batch_but_what_is_its_nodes_own(tmp_path):
    path = tmp_path / "environment.json"
    path.touch(0o600)
    path.write_text('{"MODULES": "a", "TMPDIR": "/tmp/of-the-batch", "HOSTNAME": "node1"}')
    environ = {
        SHARED: str(path),
        "TMPDIR": "/tmp/here",
        "HOSTNAME": "node2",
        "MLHPC_POD_RANK": "1",
        "OTHER": "x",
    }
    take_environment(environ)
    assert environ == {
        "MODULES": "a", "TMPDIR": "/tmp/here", "HOSTNAME": "node2", "MLHPC_POD_RANK": "1", SHARED: str(path),
    }  # fmt: skip


def test_a_file_without_variables_is_refused(tmp_path):
    path = tmp_path / "environment.json"
    path.touch(0o600)
    path.write_text("[]")
    with pytest.raises(PlaceUnknown, match="holds no variables"):
        take_environment({SHARED: str(path)})
