"""One rank and two ranks as real processes: what they send, and how each fault is named."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_helpers import HERE, LIMIT_S, ROOT, Batch, prepare_rank, run_plan
from tables import table

pytestmark = pytest.mark.servers

FAULTS = table("faults")

#: The fields of the smallest model that the language model's module builds.
LANGUAGE_MODEL = {
    "global_batch": 4, "architecture": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": None, "context": 16,
    "vocabulary": 256, "ffn": None, "text_path": "", "precision": "fp32", "optimizer": "adamw", "learning_rate": 1e-3,
    "seed": 0, "loader_workers": 0, "channels_last": False, "gradient_accumulation": 1,
}  # fmt: skip


@pytest.fixture
def batch(tmp_path):
    with Batch(str(tmp_path / "channel")) as listening:
        yield listening


@pytest.fixture
def training(rank_server, batch, tmp_path):
    """Return a function that starts a rank which trains until it is ended, and returns when it has begun."""

    def start(**changes):
        environment = prepare_rank(batch, run_plan(steps=100_000, **changes), tmp_path)
        ranks.append(rank_server.start(environment, tmp_path))
        while not batch.of("progress"):
            assert ranks[0].poll(0.01) is None
        return ranks[0]

    ranks = []
    yield start
    for rank in ranks:
        rank.kill()


def run_by_itself(batch, run, folder, **variables):
    """Run a rank of *run* as a launcher starts it."""
    command = [sys.executable, "-m", "pytest_mlhpc.node.worker.main"]
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": LIMIT_S}
    environment = prepare_rank(batch, run, folder, **variables)
    return subprocess.run(command, env=environment, check=False, **options)


def test_a_rank_starts_reports_and_closes(batch, tmp_path):
    run = run_plan(calibrate=True)

    ended = run_by_itself(batch, run, tmp_path)

    assert ended.returncode == 0, ended.stderr
    kinds = [kind for _, kind, _ in batch.messages if kind != "progress"]
    assert kinds == ["started", "report", "close"]
    (report,) = batch.reports()
    assert (report.steps, report.samples, len(report.step_times_s)) == (12, 96, 12)
    assert len(report.losses) == 4 + 12
    assert report.losses[-1] < report.losses[0]
    assert sum(report.step_times_s) <= report.epoch_s
    assert min(report.calibration_before, report.calibration_after) > 0
    assert report.exposed_communication_s is None
    assert report.environment["torch"] == batch.of("started")[0]["torch"]


def test_two_ranks_share_the_samples_and_learn_the_same(ranks):
    measurement = ranks(run_plan(ranks=2, launcher="torchrun")).measurement

    assert (measurement.ranks, measurement.devices, measurement.steps, measurement.samples) == (2, 2, 12, 96)
    assert measurement.metric("exposed_communication_time").value >= 0
    assert measurement.metric("rank_skew").value >= 0
    assert measurement.environment["torch"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(ranks, fault):
    changes, variables, failure, text = FAULTS[fault]
    done = ranks(run_plan(**changes), **variables)

    code, output = done.ended[0]
    assert (code, "Traceback" in output) == (1, True)
    assert done.failures[0].startswith(failure)
    assert text in done.failures[0]


def test_an_environment_without_torch_is_named(batch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")

    run_by_itself(batch, run_plan(), tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}:{HERE}")

    (failed,) = batch.of("failed")
    named = [text in failed["text"] for text in ("libtorch.so", sys.executable)]
    assert (failed["outcome"], named) == ("import_failed", [True, True])


def test_a_data_set_shorter_than_the_steps_is_named_with_counts(ranks, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_bytes(b"x = 1\n" * 200)
    of_files = {"data_source": "files", "data_path": str(tmp_path / "text")}

    done = ranks(run_plan(workload="language_model", parameters=LANGUAGE_MODEL, steps=500, **of_files))

    text = "data_exhausted: .* steps and .*asked were 4 steps of warm-up and 500 timed ones"
    assert [bool(re.match(text, failure)) for failure in done.failures] == [True]


def test_a_rank_whose_batch_goes_away_ends_itself(training, batch):
    rank = training(parameters={"global_batch": 8, "slow_s": 0.01})

    batch.hang_up()

    assert rank.finish()[0] == 69


def test_loader_processes_die_with_a_killed_rank(training):
    fields = {**LANGUAGE_MODEL, "loader_workers": 2, "global_batch": 2}
    rank = training(workload="language_model", parameters=fields, data_source="files")
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()

    os.kill(rank.pid, signal.SIGKILL)

    assert len(children) == 2
    assert rank.finish()[0] == -signal.SIGKILL  # when they are gone too


@pytest.mark.parametrize("asked", [True, None])
def test_the_samplers_figures_are_in_the_measurement_of_a_run_that_asks_for_it(ranks, asked):
    run = run_plan(parameters={"global_batch": 8, "seed": 3, "telemetry": asked})
    found = {one.name: one for one in ranks(run).measurement.metrics if one.name.startswith("telemetry_")}
    if not asked:
        assert found == {}
        return
    assert set(found) >= {"telemetry_cores", "telemetry_memory", "telemetry_cost"}
    assert found["telemetry_memory"].value > 50 << 20
    assert found["telemetry_cores"].value > 0
    assert all(metric.better == "none" for metric in found.values())
