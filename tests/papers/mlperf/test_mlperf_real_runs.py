"""From real trainings to logs and packages that the real checkers accept, and to a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_suites import Suite

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: For machines that do much else; a limit, never a measure.
LIMIT_S = 3600.0
#: Small models that reach the benchmarks' own targets, with the optimizers of their rules and as many seeds as they want.
TESTS = Path(__file__).with_name("suite.py.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the state directory in which the runs are recorded."""
    folder = tmp_path_factory.mktemp("mlperf")
    suite = Suite(folder / "suite", folder / "state", system="local")
    suite.tests(TESTS, "test_quality.py")
    try:
        own = {"MLHPC_LOCK_DIR": str(folder / "locks"), "MLHPC_STATE": str(folder / "state")}
        suite.start("--mlhpc-preset", "smoke", environment=own).end(limit_s=LIMIT_S).expect(0, passed=15)
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
def test_logs_of_real_runs_are_accepted(recorded, tmp_path, mlhpc, workload, division, printed):  # noqa: PLR0917 - a row
    words = ["--benchmark", workload, "--org", "EPCC", "--division", division, "--output", tmp_path / "logs"]
    out = mlhpc("papers", "mlperf", "log", "--state-dir", recorded, *words).out
    belongs = f"by the rules these runs belong in no division of MLPerf; their logs say {division}"
    assert [text for text in ("reached its target", printed, belongs) if text not in out] == []
    number = {"cosmoflow": 10, "deepcam": 5}[workload]
    assert f"{number} accepted, 0 rejected" in mlhpc("papers", "mlperf", "check", tmp_path / "logs").out


def test_a_real_run_has_a_breakdown_and_stands_beside_published_ones(recorded, mlhpc):
    out = mlhpc("papers", "mlperf", "report", "--state-dir", recorded).out
    apart = "Not to be compared with published results: test_cosmoflow on local:cpu: synthetic data"
    titles = ("Where the time went\n", "Published results of cosmoflow\n")
    assert [text for text in (*titles, apart) if text not in out] == []


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    """Return what no record knows of this machine."""
    fields = (
        "host_processors_per_node", "host_processor_core_count", "host_memory_capacity", "host_storage_type",
        "host_storage_capacity", "host_networking", "host_networking_topology", "host_memory_configuration", "cooling",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("description") / "here.yaml"
    path.write_text("".join(f"{name}: as in tests\n" for name in fields))
    return path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--division", "open"], 0, ": accepted\n"),
        (["--division", "closed", "--benchmark", "cosmoflow"], 0, "slower convergence on smaller batch size"),
        (["--division", "closed", "--benchmark", "deepcam"], 1, "failed test: v['value'] == 121266"),
    ],
)
def test_a_package_of_real_runs_is_accepted_where_its_rules_can_be_kept(  # noqa: PLR0917 - a row
    recorded, description, tmp_path, mlhpc, words, code, said
):
    asked = ["--state-dir", recorded, "--org", "EPCC", "--description", description, *words]
    out = mlhpc("papers", "mlperf", "package", *asked, "--output", tmp_path / "EPCC", code=code).out
    assert said in out


def test_a_package_runs_what_it_says_again(recorded, description, tmp_path, mlhpc):
    asked = ["--state-dir", recorded, "--org", "EPCC", "--description", description, "--division", "open"]
    mlhpc("papers", "mlperf", "package", *asked, "--output", tmp_path / "EPCC")
    (here,) = (tmp_path / "EPCC" / "benchmarks" / "cosmoflow").glob("local*")
    (command,) = (
        line.split()[1:]
        for line in (here / "README.md").read_text().splitlines()
        if "sh run_and_time.sh" in line
    )
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MLHPC_STATE": str(tmp_path / "state"),
    }
    done = subprocess.run(
        ["sh", *command, "-k", "local:cpu-3]", "-p", "no:cacheprovider"], cwd=here, env=environment, capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, "1 passed, 9 deselected" in done.stdout) == (0, True), done.stdout + done.stderr


#: Ranks of one node, as many as every machine has cores for, and batches.
SWEEP = """\
@pytest.mark.parametrize("global_batch", [8, 16])
@pytest.mark.parametrize("devices_per_node", [1, 2])
@train(
    "cosmoflow", until="quality", data="files", judge=False, time_limit="30m", loader_workers=0, input_size=8, layers=2,
    base_channels=8, dropout=0.0, learning_rate=0.02, train_samples=96, eval_samples=16, max_epochs=60, seed=1, threads=1,
)
def test_sweep(run):
    assert run["quality"].value <= 0.124
"""


def test_a_real_sweep_over_ranks_and_batches_shows_communication_and_the_joined_axes(tmp_path, mlhpc):
    suite = Suite(tmp_path / "suite", tmp_path / "state", system="local")
    suite.tests(SWEEP, "test_sweep.py")
    try:
        own = {"MLHPC_LOCK_DIR": str(tmp_path / "locks"), "MLHPC_STATE": str(tmp_path / "state")}
        suite.start("--mlhpc-preset", "smoke", environment=own).end(limit_s=LIMIT_S).expect(0, passed=4)
    finally:
        suite.close()
    words = ["papers", "mlperf", "report", "--state-dir", tmp_path / "state"]
    rows = json.loads(mlhpc(*words, "--json").out)["sheets"]["communication"]["rows"]
    assert [(row["global batch"], row["devices"]) for row in rows] == [(8, 2), (16, 2)]
    assert all(0 <= row["communication [%]"] <= 100 for row in rows)
    page = mlhpc(*words, "--format", "html").out
    wanted = ("communication, % of a step over devices", "time to train, s over global batch")
    assert [one for one in wanted if f'aria-label="{one}"' not in page] == []
