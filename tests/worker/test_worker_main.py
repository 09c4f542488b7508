"""One rank and two ranks as real processes: what they send, and how each fault is named."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from rank_helpers import HERE, ROOT, Batch, finish, run_plan, start_rank

from pytest_mlhpc.results.combine import combine
from pytest_mlhpc.worker.accelerators.binding import threads_of

pytestmark = pytest.mark.servers


@pytest.fixture
def batch(tmp_path):
    with Batch(str(tmp_path / "channel")) as listening:
        yield listening


def run_one(batch, tmp_path, run, **variables):
    ((code, output),) = finish(start_rank(batch, run, tmp_path, **variables))
    for thread in batch.threads[1:]:
        thread.join(5)
    return code, output


def failure(batch, code, output):
    assert code == 1, output
    assert batch.of("report") == []
    (body,) = batch.of("failed")
    return body["outcome"], body["text"]


def language_model(**changes):
    """The fields of the smallest model that the language model's module builds."""
    fields = {
        "global_batch": 4, "architecture": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": None,
        "context": 16, "vocabulary": 256, "ffn": None, "text_path": "", "precision": "fp32", "optimizer": "adamw",
        "learning_rate": 1e-3, "seed": 0, "loader_workers": 0, "channels_last": False, "gradient_accumulation": 1,
    }  # fmt: skip
    return {**fields, **changes}


def test_a_rank_starts_reports_and_closes(batch, tmp_path):
    run = run_plan(calibrate=True)

    code, output = run_one(batch, tmp_path, run)

    assert code == 0, output
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


def test_two_ranks_share_the_samples_and_learn_the_same(batch, tmp_path):
    run = run_plan(ranks=2, launcher="torchrun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start_rank(batch, run, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in (0, 1)
    ]

    ended = finish(*ranks)
    for thread in batch.threads[1:]:
        thread.join(5)

    assert [code for code, _ in ended] == [0, 0], ended
    measurement = combine(run, batch.reports())
    assert (measurement.ranks, measurement.devices, measurement.steps, measurement.samples) == (2, 2, 12, 96)
    assert measurement.metric("exposed_communication_time").value >= 0
    assert measurement.metric("rank_skew").value >= 0
    assert measurement.environment["torch"]


def test_a_missing_accelerator_is_named_and_never_replaced_by_the_cpu(batch, tmp_path):
    outcome, text = failure(
        batch, *run_one(batch, tmp_path, run_plan(device_type="cuda"), CUDA_VISIBLE_DEVICES="")
    )

    assert outcome == "wrong_device"
    assert "NVIDIA GPU" in text


def test_a_loss_that_is_no_number_is_named_with_its_step(batch, tmp_path):
    run = run_plan(parameters={"global_batch": 8, "nan": True})

    outcome, text = failure(batch, *run_one(batch, tmp_path, run))

    assert outcome == "loss_nan"
    assert "step 0" in text


def test_an_exception_travels_with_the_end_of_its_traceback(batch, tmp_path):
    run = run_plan(parameters={"global_batch": 8, "explode": True})

    code, output = run_one(batch, tmp_path, run)

    outcome, text = failure(batch, code, output)
    assert outcome == "worker_exit"
    assert text.startswith("RuntimeError: the device caught fire")
    assert "tiny_workload.py" in text
    assert "Traceback" in output


def test_an_environment_without_torch_is_named(batch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")

    outcome, text = failure(
        batch, *run_one(batch, tmp_path, run_plan(), PYTHONPATH=f"{tmp_path}:{ROOT}:{HERE}")
    )

    assert outcome == "import_failed"
    assert "libtorch.so" in text
    assert sys.executable in text


def test_an_unknown_workload_is_named(batch, tmp_path):
    run = run_plan(workload="nothing_like_it", variables={})

    outcome, text = failure(batch, *run_one(batch, tmp_path, run))

    assert outcome == "import_failed"
    assert "'nothing_like_it'" in text


def test_a_launcher_that_starts_too_few_ranks_is_named(batch, tmp_path):
    outcome, text = failure(batch, *run_one(batch, tmp_path, run_plan(ranks=2)))

    assert outcome == "too_few_ranks"
    assert "asked were 2 ranks, the launcher 'plain' started 1" in text


def test_a_batch_that_cannot_be_shared_is_named(batch, tmp_path):
    run = run_plan(parameters={"global_batch": 9, "gradient_accumulation": 2})

    outcome, text = failure(batch, *run_one(batch, tmp_path, run))

    assert outcome == "worker_exit"
    assert "global_batch=9 is not divisible" in text


def test_a_plan_without_the_run_is_a_mismatch(batch, tmp_path):
    outcome, text = failure(batch, *run_one(batch, tmp_path, run_plan(), MLHPC_RUN="another"))

    assert outcome == "protocol_mismatch"
    assert "'another'" in text


def test_a_data_set_shorter_than_the_steps_is_named_with_counts(batch, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_bytes(b"x = 1\n" * 200)
    run = run_plan(
        workload="language_model",
        parameters=language_model(),
        data_source="files",
        data_path=str(folder),
        steps=500,
    )

    outcome, text = failure(batch, *run_one(batch, tmp_path, run))

    assert outcome == "data_exhausted"
    assert "steps and" in text
    assert "asked were 4 steps of warm-up and 500 timed ones" in text


def test_a_rank_whose_batch_goes_away_ends_itself(batch, tmp_path):
    run = run_plan(steps=100_000, parameters={"global_batch": 8, "slow_s": 0.01})
    rank = start_rank(batch, run, tmp_path)
    while not batch.of("progress"):
        assert rank.poll() is None, rank.communicate()
        batch.threads[-1].join(0.05)

    batch.hang_up()

    ((code, _),) = finish(rank)
    assert code == 69


def test_loader_processes_die_with_a_killed_rank(batch, tmp_path):
    run = run_plan(
        workload="language_model",
        parameters=language_model(loader_workers=2, global_batch=2),
        data_source="files",
        steps=100_000,
    )
    rank = start_rank(batch, run, tmp_path)
    while not batch.of("progress"):
        assert rank.poll() is None, rank.communicate()
        batch.threads[-1].join(0.05)
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()

    rank.kill()
    rank.wait()  # not for its output: that pipe is open for as long as a loader process lives
    rank.stdout.close()

    # The fixture nothing_left sees whether they are gone; torch itself would need five seconds.
    assert len(children) == 2


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        ({}, 6),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OMP_NUM_THREADS": "many"}, 6),
    ],
    ids=["nothing", "a-number", "a-list", "no-number"],
)
def test_a_rank_computes_with_as_many_threads_as_its_environment_says_else_as_it_owns_cores(said, threads):
    assert threads_of(run_plan(cores_per_rank=6, variables=said)) == threads
