"""An interpreter that does not have this package gets it as the payload; also tried on a newer Slurm (test_slurm_versions.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults import ONE


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """The system's interpreter; where that is ours, one without packages."""
    system = Path("/usr/bin/python3")
    if system.exists() and system.resolve() != Path(sys.executable).resolve():
        return str(system)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=600
    )
    return str(tmp_path / "bare/bin/python")


def test_an_interpreter_without_this_package_runs_the_payload(suite, other_python):
    suite.partition(python=other_python)
    suite.tests(ONE)
    suite.run().expect(0, passed=1)
    (payload,) = (suite.state / "payload").glob("*.zip")
    (script,) = (suite.state / "runs").rglob("job.sh")
    assert str(payload) in script.read_text()
