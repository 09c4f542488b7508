"""A captured step trains like an ordinary one. What captures is a stand-in that really computes: no GPU is needed to see that."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import tiny_workload
import torch
from probe_ranks import task_of
from rank_helpers import run_plan

from pytest_mlhpc.node.worker import loop, prepare, reporting
from pytest_mlhpc.node.worker.accelerators import gpu
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Recorder


class Capturing(Cpu):
    """Cores that act as a device with graphs: capturing changes nothing, replaying does the work again in one place."""

    asynchronous = True

    def __init__(self):
        super().__init__(0, "capturing")
        self.queued = []
        self.trainer = None

    def wait(self, mark):
        pass

    def aside(self, work):
        self.queued.append("aside")
        return work()

    def capture(self, work):
        self.queued.append("captures")
        model, optimizer = self.trainer.model, self.trainer.optimizer
        assert all(weight.grad is None for weight in model.parameters())
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        place = work().detach().clone()
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])

        def replay():
            self.queued.append("replays")
            optimizer.zero_grad(set_to_none=True)
            place.copy_(work().detach())

        return place, replay


def trainer_on(device, **options):
    task = tiny_workload.task({"seed": 1})
    model = task.model()
    return loop.Trainer(task, model, torch.optim.Adam(model.parameters(), lr=0.05), device, **options)


def captured_trainer(eager=3, **options):
    device = Capturing()
    device.trainer = trainer_on(device, captured=gpu.CapturedStep(device, eager), **options)
    return device.trainer


def plain_trainer():
    return trainer_on(Cpu(0, "plain"))


def batches(size=4):
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.rand((size, 4), generator=generator), torch.rand((size, 2), generator=generator), 0.0


def train(trainer, stream, steps):
    recorder = Recorder()
    recorder.start(trainer.accelerator)
    loop.run_steps(trainer, stream, steps, recorder, lambda _step, _samples: None)
    return recorder


def test_losses_and_weights_are_those_of_ordinary_steps():
    captured, plain = captured_trainer(), plain_trainer()

    records = [train(one, batches(), 10) for one in (captured, plain)]

    torch.testing.assert_close(records[0].losses, records[1].losses)
    torch.testing.assert_close(captured.model.state_dict(), plain.model.state_dict())


def test_ordinary_steps_on_a_side_stream_come_first_and_one_capture_serves_all_others():
    trainer = captured_trainer(eager=3)

    train(trainer, batches(), 6)

    assert trainer.accelerator.queued == ["aside"] * 3 + ["captures"] + ["replays"] * 3
    assert trainer.captured.captured


def test_each_step_leaves_its_stamps_and_marks_though_its_parts_have_none():
    recorder = train(captured_trainer(), batches(), 5)

    assert len(recorder.stamps) == len(recorder.marks) == len(recorder.losses) == 5
    assert all(row[3] == row[4] for row in recorder.stamps)
    assert all(marks.forward is marks.backward for marks in recorder.marks)


def test_losses_of_earlier_steps_are_not_overwritten_by_later_ones():
    recorder = train(captured_trainer(eager=0), itertools.repeat(next(batches())), 6)
    losses = loop.resolve_losses(recorder.losses)
    assert len(set(losses)) == 6
    assert losses[-1] < losses[0]


def test_a_batch_of_another_shape_is_refused():
    trainer = captured_trainer(eager=0)
    train(trainer, batches(4), 2)
    text = r"^worker_exit: cuda_graphs: a batch of \(3, 4\) came after one of \(4, 4\)"
    with pytest.raises(WorkerFailure, match=text):
        train(trainer, batches(3), 1)


def test_with_a_scaler_the_update_stays_outside_the_graph():
    scaled = captured_trainer(eager=1, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    plain = plain_trainer()
    for one in (scaled, plain):
        train(one, batches(), 6)
    torch.testing.assert_close(scaled.model.state_dict(), plain.model.state_dict())


def test_a_device_without_graphs_refuses_them():
    run = run_plan(parameters={"cuda_graphs": True})
    text = r"^wrong_device: cuda_graphs: cpu has no graphs; set cuda_graphs=False"
    with pytest.raises(WorkerFailure, match=text):
        prepare.build(run, tiny_workload.task({}), Group(), Cpu(0, "test"), 1)


def test_the_model_of_several_ranks_is_built_aside_and_warmed_longer():
    device = Capturing()
    assert gpu.on_side_stream(device, lambda: 7, wanted=True) == 7
    assert device.queued == ["aside"]
    assert [gpu.captured_step({"cuda_graphs": True}, device, ranks)._eager for ranks in (1, 4)] == [3, 11]
    assert gpu.captured_step({}, device, 4) is None


@pytest.mark.parametrize(
    ("workload", "optimizer"),
    [
        ("cosmoflow", "sgd"), ("deepcam", "lars"), ("language_model", "adamw"),
        *(("resnet50", optimizer) for optimizer in ("sgd", "adam", "adamw", "lars")),
    ],
)  # fmt: skip
def test_no_step_of_reference_size_asks_the_device_for_a_value(workload, optimizer):
    """Tensors of the `meta` device have none: whoever asks fails, as it would while a graph is captured."""
    fields = {"optimizer": optimizer, "channels_last": workload != "language_model"}
    task = task_of(workload, "reference", **fields)
    with reporting.on_meta():
        model = task.model()
    trainer = loop.Trainer(task, model, task.optimizer(model), SimpleNamespace(device=torch.device("meta")))
    batch = [
        torch.empty((2, *spec.shape), dtype=spec.dtype, device="meta") for spec in (task.input, task.target)
    ]
    assert gpu._captured_part(trainer, batch).shape == ()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("graphs_asked", "ranks", "calmed"),
    [(None, 4, {}), (True, 1, {}), (True, 4, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})],
)
def test_the_watchdog_is_calmed_for_captured_steps_of_several_ranks_alone(graphs_asked, ranks, calmed):
    found = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
    gpu.calm_watchdog({"cuda_graphs": graphs_asked}, ranks, found)
    assert found == {"NCCL_ASYNC_ERROR_HANDLING": "1", **calmed}
