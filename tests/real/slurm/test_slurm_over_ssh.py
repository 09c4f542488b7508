"""The real Slurm behind a real sshd: suites as of a laptop, whose jobs are another user's."""

import json
import os

import pytest
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, write_suite
from sshd_service import LOGIN, login_node


@pytest.fixture
def login(request, slurm, tmp_path, monkeypatch):
    """A login node of the shared cluster; Slurm's commands on this machine lead nowhere."""
    variables = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "SBATCH_WCKEY": os.environ["MLHPC_TEST"]}
    for node in login_node(request.config, tmp_path, variables):
        for name, value in node.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
        yield node


@pytest.fixture
def far(make_suite, slurm, login):
    """A suite whose system is reached by ssh."""
    suite = make_suite(slurm)
    suite.partition(python="python3", shared_directory=str(login.shared))
    behind(suite, LOGIN)
    return suite


def behind(suite, destination):
    """Let the system of *suite* be reached by ssh."""
    path = suite.folder / "systems.yaml"
    content = json.loads(path.read_text())
    content["systems"]["cluster"]["transport"] = {"ssh": destination}
    path.write_text(json.dumps(content))


def test_a_program_runs_as_the_user_of_the_login_node_and_leaves_nothing_there(far, login):
    far.tests(
        """
@script("id -un; echo rate: 4; echo a warning >&2")
def test_it(run):
    assert run["rate"].value == 4
    assert "mlhpc-ssh" in run.output
"""
    )
    far.run().expect(0, passed=1)
    assert login.left() == ["runs"]
    assert far.ledgers() == []
