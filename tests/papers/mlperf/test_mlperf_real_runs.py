"""From a real training to a log that the real checker accepts, and to a report."""

from pathlib import Path

import pytest
from running_suites import Suite

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: For machines that do much else; a limit, never a measure.
LIMIT_S = 1800.0
#: A small model that reaches the benchmark's own target within a few training epochs, with the optimizer of its rules.
TESTS = Path(__file__).with_name("suite.py.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the state directory in which the run is recorded."""
    folder = tmp_path_factory.mktemp("mlperf")
    suite = Suite(folder / "suite", folder / "state", system="local")
    suite.tests(TESTS, "test_quality.py")
    try:
        own = {"MLHPC_LOCK_DIR": str(folder / "locks"), "MLHPC_STATE": str(folder / "state")}
        suite.start("--mlhpc-preset", "smoke", environment=own).end(limit_s=LIMIT_S).expect(0, passed=2)
    finally:
        suite.close()
    return folder / "state"


@pytest.mark.parametrize(
    ("workload", "division", "printed"),
    [
        ("cosmoflow", "closed", "data_set: synthetic data; 96 training samples, not 524,288; 16 evaluation samples, not 65,536"),
        ("deepcam", "open", "48 training samples, not 121,266"),
    ],
)  # fmt: skip
def test_a_log_of_a_real_run_is_accepted(recorded, tmp_path, mlhpc, workload, division, printed):  # noqa: PLR0917 - a row
    words = ["--benchmark", workload, "--org", "EPCC", "--division", division, "--output", tmp_path / "logs"]
    out = mlhpc("papers", "mlperf", "log", "--state-dir", recorded, *words).out
    belongs = f"by the rules these runs belong in no division of MLPerf; their logs say {division}"
    assert [text for text in ("reached its target", printed, belongs) if text not in out] == []
    assert "1 accepted, 0 rejected" in mlhpc("papers", "mlperf", "check", tmp_path / "logs").out


def test_a_real_run_has_a_breakdown_and_stands_beside_published_ones(recorded, mlhpc):
    out = mlhpc("papers", "mlperf", "report", "--state-dir", recorded).out
    apart = "Not to be compared with published results: test_cosmoflow on local:cpu: synthetic data"
    titles = ("Where the time went\n", "Published results of cosmoflow\n")
    assert [text for text in (*titles, apart) if text not in out] == []
