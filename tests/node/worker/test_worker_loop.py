import itertools
from dataclasses import replace

import pytest
import tiny_workload
import torch

from pytest_mlhpc.node.protocol.plan import PlantedFault
from pytest_mlhpc.node.worker import loop
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Clock, Recorder


class Queue(Cpu):
    """A device that acts as if it had a queue, and counts who waits for it."""

    asynchronous = True

    def __init__(self):
        super().__init__(0, "queue")
        self.synchronized = 0
        self.waits = []

    def synchronize(self):
        self.synchronized += 1

    def wait(self, mark):
        self.waits.append(mark)


def trainer(accelerator=None, **options):
    task = tiny_workload.task({"seed": 1})
    model = task.model()
    return loop.Trainer(task, model, task.optimizer(model), accelerator or Cpu(0, "test"), **options)


def stream(size=4, count=None):
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count() if count is None else range(count):
        yield torch.rand((size, 4), generator=generator), torch.rand((size, 2), generator=generator), 0.25


def no_progress(step, samples):
    raise AssertionError(f"progress of step {step} ({samples} samples) within the first second")


def train(made, steps, batches=None, *, clock=None, progress=no_progress):
    """Train *made* and return what was recorded."""
    recorder = Recorder(clock or Clock(perf=itertools.count().__next__))
    recorder.start(made.accelerator)
    loop.run_steps(made, stream() if batches is None else batches, steps, recorder, progress)
    return recorder


def test_training_leaves_six_stamps_a_loss_and_counts_for_each_step():
    recorder = train(trainer(), 5)
    assert (len(recorder.stamps), len(recorder.losses), recorder.samples, recorder.read_s) == (5, 5, 20, 1.25)
    flat = [recorder.start_ns, *itertools.chain.from_iterable(recorder.stamps)]
    assert flat == sorted(flat)


def test_losses_fall_on_data_that_repeats():
    losses = loop.resolve_losses(train(trainer(), 50, itertools.cycle([next(stream())])).losses)

    assert losses[-1] < losses[0]


def test_no_step_waits_for_the_device_but_for_the_one_before_the_last():
    device = Queue()

    recorder = train(trainer(device), 6)

    assert device.synchronized == 0
    assert device.waits == [marks.updated for marks in recorder.marks[:4]]


def test_losses_stay_on_the_device_and_hold_no_graph():
    assert not any(loss.requires_grad for loss in train(trainer(), 2).losses)


def test_accumulated_micro_batches_train_like_one_batch():
    whole, halved = trainer(), trainer(accumulate=2)
    inputs, targets, _ = next(stream(size=8))
    halves = [(inputs[:4], targets[:4], 0.0), (inputs[4:], targets[4:], 0.0)]

    of_whole, of_halves = train(whole, 1, iter([(inputs, targets, 0.0)])), train(halved, 1, iter(halves))

    torch.testing.assert_close(whole.model.weight, halved.model.weight)
    torch.testing.assert_close(of_whole.losses[0], of_halves.losses[0])
    assert of_halves.samples == 8


def test_a_loader_that_ends_early_is_named_with_steps_and_samples():
    with pytest.raises(WorkerFailure, match=r"data_exhausted: .*ended after 3 steps and 12 samples"):
        train(trainer(), 5, stream(count=3))


def test_a_loss_that_is_not_finite_is_named_with_its_step():
    losses = [torch.tensor(value) for value in (1.0, float("inf"), float("nan"))]

    with pytest.raises(WorkerFailure, match="loss_nan: the loss of step 17 is inf"):
        loop.resolve_losses(losses, first_step=16)


def test_progress_is_reported_at_most_once_a_second():
    ticks = itertools.count(step=50_000_000)  # six readings a step: 0.3 s
    progress = []

    train(trainer(), 12, clock=Clock(perf=lambda: next(ticks)), progress=lambda *now: progress.append(now))

    assert progress == [(4, 16), (8, 32), (12, 48)]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_decides_what_the_model_computes_in(precision, dtype):
    made, dtypes = trainer(precision=precision), []
    made.model.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    train(made, 1)
    assert dtypes == [dtype]


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp16"), ("cuda", "bf16")])
def test_only_fp16_on_cuda_scales_gradients(device, precision):
    assert loop.grad_scaler(device, precision) is None


def test_a_planted_delay_of_steps_is_a_share_of_the_step_without_it_and_counts_as_computing():
    plain, slowed = (
        loop.resolve(train(replace(trainer(), fault=fault), 6), trainer().accelerator)
        for fault in (None, PlantedFault("slow-steps", 2.0))
    )
    step = plain.step_times_s[1]
    # Each reading of the clock is a nanosecond; a delay begins and ends with one.
    assert slowed.step_times_s[1:] == pytest.approx((3 * step,) * 5, abs=4e-9)
    assert slowed.wait_s == plain.wait_s
    assert slowed.forward_s - plain.forward_s == pytest.approx(5 * 2 * step, abs=20e-9)


def test_a_planted_delay_of_reading_counts_as_waiting_for_data():
    slowed = train(replace(trainer(), fault=PlantedFault("slow-reading", 2.0)), 6)
    plain = train(trainer(), 6)
    found, usual = (loop.resolve(one, trainer().accelerator) for one in (slowed, plain))
    assert found.wait_s - usual.wait_s == pytest.approx(5 * 2 * usual.step_times_s[1], abs=20e-9)
    assert found.forward_s == usual.forward_s


def test_a_device_with_a_queue_is_idle_before_a_planted_delay_so_that_the_delay_is_not_hidden():
    device = Queue()
    recorder = train(replace(trainer(device), fault=PlantedFault("slow-steps", 0.5)), 3)
    assert [device.waits.count(marks.updated) > 0 for marks in recorder.marks] == [True, True, False]
