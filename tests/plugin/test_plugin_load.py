"""What an ordinary pytest pays for the plug-in, and its help."""

import subprocess
import sys

from inner_sessions import ONE_JOB

HEAVY = ("torch", "kubernetes", "influxdb_client", "numpy", "pydantic", "rich", "pyslurm", "yaml")

PROBE = f"""
import sys, pytest
code = pytest.main(sys.argv[1:])
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
print("OURS", [name for name in sys.modules if name.startswith("pytest_mlhpc")])
sys.exit(code)
"""


def test_without_system_nothing_heavy_is_imported(suite):
    suite.file("conftest.py", "")
    suite.file("test_plain.py", "def test_plain(): pass\n")
    argv = [sys.executable, "-c", PROBE]
    found = subprocess.run(argv, cwd=suite.folder, capture_output=True, text=True, check=True).stdout
    assert "LOADED []" in found
    (ours,) = [line for line in found.splitlines() if line.startswith("OURS")]
    assert "pytest_mlhpc.plugin" in ours
    assert "session.session" not in ours
    assert "judge" not in ours


def test_ini_values_stand_in_for_options(suite):
    suite.write(ONE_JOB)
    suite.file("pytest.ini", "[pytest]\nmlhpc_system = local\nmlhpc_state = here\nmlhpc_max_jobs = 2\n")
    suite.run(system="").assert_outcomes(passed=1)
    assert (suite.folder / "here" / "records").is_dir()
