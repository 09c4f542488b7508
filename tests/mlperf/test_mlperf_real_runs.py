"""From a real training to a log that the real checker accepts, and to a report."""

import pytest
from running_suites import Suite

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: For machines that do much else; a limit, never a measure.
LIMIT_S = 1800.0
#: A small model that reaches the benchmark's own target within a few training epochs, with the optimizer of its rules.
TESTS = """\
import pytest

COSMOFLOW = dict(
    input_size=8, layers=2, base_channels=8, dropout=0.0, optimizer="sgd", learning_rate=0.02, global_batch=8,
    train_samples=96, eval_samples=16, max_epochs=30, seed=1,
)


@pytest.mark.train("cosmoflow", until="quality", data="files", judge=False, time_limit="30m", loader_workers=0, **COSMOFLOW)
def test_cosmoflow(run):
    assert run["quality"].value <= 0.124


DEEPCAM = dict(
    height=32, width=48, width_multiplier=0.125, middle_blocks=1, learning_rate=0.005, global_batch=4,
    train_samples=48, eval_samples=8, max_epochs=24, seed=1,
)


@pytest.mark.train("deepcam", until="quality", data="files", judge=False, time_limit="30m", loader_workers=0, **DEEPCAM)
def test_deepcam(run):
    assert run["quality"].value >= 0.82
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the state directory in which the run is recorded."""
    folder = tmp_path_factory.mktemp("mlperf")
    suite = Suite(folder / "suite", folder / "state", system="local")
    suite.tests(TESTS, "test_quality.py")
    try:
        own = {"MLHPC_LOCK_DIR": str(folder / "locks"), "MLHPC_STATE": str(folder / "state")}
        suite.start("--preset", "smoke", environment=own).end(limit_s=LIMIT_S).expect(0, passed=2)
    finally:
        suite.close()
    return folder / "state"


@pytest.mark.parametrize(
    "case",
    [
        ("cosmoflow", "closed", "data_set: synthetic data; 96 training samples, not 524,288; 16 evaluation samples, not 65,536"),
        ("deepcam", "open", "48 training samples, not 121,266"),
    ],
)  # fmt: skip
def test_a_log_of_a_real_run_is_accepted(recorded, tmp_path, mlhpc, case):
    benchmark, division, printed = case
    words = ["--benchmark", benchmark, "--org", "EPCC", "--division", division, "--output", tmp_path / "logs"]
    out = mlhpc("mlperf", "log", "--state-dir", recorded, *words).out
    assert "reached its target" in out
    assert printed in out
    assert f"by the rules these runs belong in no division of MLPerf; their logs say {division}" in out
    assert "1 accepted, 0 rejected" in mlhpc("mlperf", "check", tmp_path / "logs").out


def test_a_real_run_has_a_breakdown_and_stands_beside_published_ones(recorded, mlhpc):
    out = mlhpc("mlperf", "report", "--state-dir", recorded).out
    assert "Where the time went\n" in out
    assert "Published results of cosmoflow\n" in out
    assert "Not to be compared with published results: test_cosmoflow on local:cpu: synthetic data" in out
