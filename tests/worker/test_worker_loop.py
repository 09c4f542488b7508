from __future__ import annotations

import itertools

import pytest
import tiny_workload
import torch

from pytest_mlhpc.worker import loop
from pytest_mlhpc.worker.accelerators.cpu import Cpu
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.timing import Clock, Recorder


class Watched(Cpu):
    """A device that acts as if it had a queue, and counts who waits for it."""

    asynchronous = True

    def __init__(self):
        super().__init__(0, "watched")
        self.synchronized = 0
        self.waited = []

    def synchronize(self):
        self.synchronized += 1

    def wait(self, mark):
        self.waited.append(mark)


def trainer(accelerator=None, accumulate=1, **parameters):
    task = tiny_workload.task({"seed": 1, **parameters})
    model = task.model()
    return loop.Trainer(
        task, model, task.optimizer(model), accelerator or Cpu(0, "test"), accumulate=accumulate
    )


def stream(size=4, seed=0, count=None):
    generator = torch.Generator().manual_seed(seed)
    steps = itertools.count() if count is None else range(count)
    for _ in steps:
        yield torch.rand((size, 4), generator=generator), torch.rand((size, 2), generator=generator), 0.25


def recorder_of(accelerator, clock=None):
    recorder = Recorder(clock or Clock())
    recorder.start(accelerator)
    return recorder


def quiet(step, samples):
    raise AssertionError(f"told of step {step} ({samples} samples) within the first second")


def test_training_leaves_six_stamps_a_loss_and_counts_for_each_step():
    made = trainer()
    recorder = recorder_of(made.accelerator)

    loop.run_steps(made, stream(), 5, recorder, quiet)

    assert len(recorder.stamps) == len(recorder.losses) == 5
    assert recorder.samples == 20
    assert recorder.read_s == 1.25
    flat = [recorder.start_ns, *itertools.chain.from_iterable(recorder.stamps)]
    assert flat == sorted(flat)


def test_losses_fall_on_data_that_repeats():
    made = trainer()
    recorder = recorder_of(made.accelerator)

    loop.run_steps(made, itertools.cycle([next(stream())]), 50, recorder, quiet)

    losses = loop.resolve_losses(recorder.losses)
    assert losses[-1] < losses[0]


def test_no_step_waits_for_the_device_but_for_the_one_before_the_last():
    device = Watched()
    made = trainer(device)
    recorder = recorder_of(device)

    loop.run_steps(made, stream(), 6, recorder, quiet)

    assert device.synchronized == 0
    assert device.waited == [marks.updated for marks in recorder.marks[:4]]


def test_losses_stay_on_the_device_and_hold_no_graph():
    made = trainer()
    recorder = recorder_of(made.accelerator)

    loop.run_steps(made, stream(), 2, recorder, quiet)

    assert all(isinstance(loss, torch.Tensor) and not loss.requires_grad for loss in recorder.losses)


def test_accumulated_micro_batches_train_like_one_batch():
    whole, parts = trainer(), trainer(accumulate=2)
    inputs, targets, _ = next(stream(size=8))
    halves = [(inputs[:4], targets[:4], 0.0), (inputs[4:], targets[4:], 0.0)]
    records = [recorder_of(whole.accelerator), recorder_of(parts.accelerator)]

    loop.run_steps(whole, iter([(inputs, targets, 0.0)]), 1, records[0], quiet)
    loop.run_steps(parts, iter(halves), 1, records[1], quiet)

    torch.testing.assert_close(whole.model.weight, parts.model.weight)
    torch.testing.assert_close(records[0].losses[0], records[1].losses[0])
    assert records[1].samples == 8


def test_a_loader_that_ends_early_is_named_with_steps_and_samples():
    made = trainer()

    with pytest.raises(WorkerFailure, match="ended after 3 steps and 12 samples") as caught:
        loop.run_steps(made, stream(count=3), 5, recorder_of(made.accelerator), quiet)

    assert caught.value.outcome == "data_exhausted"


def test_a_loss_that_is_not_finite_is_named_with_its_step():
    losses = [torch.tensor(1.0), torch.tensor(float("inf")), torch.tensor(float("nan"))]

    with pytest.raises(WorkerFailure, match="the loss of step 17 is inf") as caught:
        loop.resolve_losses(losses, first_step=16)

    assert caught.value.outcome == "loss_nan"


def test_progress_is_told_at_most_once_a_second():
    ticks = itertools.count(step=50_000_000)  # six readings a step: 0.3 s
    clock = Clock(perf=lambda: next(ticks))
    made, told = trainer(), []
    recorder = recorder_of(made.accelerator, clock)

    loop.run_steps(made, stream(), 12, recorder, lambda step, samples: told.append((step, samples)))

    assert told == [(4, 16), (8, 32), (12, 48)]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_decides_what_the_model_computes_in(precision, dtype):
    made, seen = trainer(), []
    made = loop.Trainer(made.task, made.model, made.optimizer, made.accelerator, precision=precision)
    made.model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))

    loop.run_steps(made, stream(), 1, recorder_of(made.accelerator), quiet)

    assert seen == [dtype]


def test_only_fp16_on_cuda_scales_gradients():
    assert loop.grad_scaler("cpu", "fp16") is None
    assert loop.grad_scaler("cuda", "bf16") is None
