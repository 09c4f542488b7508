"""Fields of arithmetic on this machine's cores, for real: what they compute agrees with the plain path."""

from __future__ import annotations

import itertools
import math
import subprocess

import pytest
import torch
from probe_ranks import free_port
from rank_helpers import Batch, finish, run_plan, start_rank

from pytest_mlhpc.worker import loop, prepare, rank
from pytest_mlhpc.worker.accelerators import compiled
from pytest_mlhpc.worker.accelerators.cpu import Cpu
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.timing import Recorder
from pytest_mlhpc.worker.workloads import optimizers
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

pytestmark = pytest.mark.servers  # trainings

#: Sizes at which a step of each workload takes milliseconds.
TINY = {
    "cosmoflow": {"input_size": 16, "layers": 3, "base_channels": 4, "dropout": 0.0},
    "deepcam": {"height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1},
    "resnet50": {"image_size": 64, "classes": 4},
    "language_model": {"layers": 2, "hidden": 32, "heads": 2, "context": 16, "vocabulary": 256},
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # threads that wait for each other on a busy machine cost many times what they save
    yield
    torch.set_num_threads(before)


def trainer_of(workload, **changes):
    known = next(one for one in WORKLOADS if one.name == workload)
    parameters = parameters_of(known, "smoke", **{**TINY[workload], **changes})
    run = run_plan(workload=workload, parameters=parameters, variables={})
    torch.manual_seed(1)
    task = prepare.load_task(run)
    return prepare.build(run, task, Group(), Cpu(0, "test"), 1)


def samples_of(task, count):
    generator = torch.Generator().manual_seed(5)

    def one(spec, high):
        if spec.dtype.is_floating_point:
            return torch.rand((count, *spec.shape), generator=generator)
        return torch.randint(0, int(high), (count, *spec.shape), generator=generator).to(spec.dtype)

    return one(task.input, task.high), one(task.target, task.classes or 2), 0.0


def losses_of(trainer, steps=4):
    """Train some steps on one batch. Of ResNet-50 the first alone: normalisation over few samples makes the others chaotic."""
    first = trainer.task.name == "resnet50"
    recorder = Recorder()
    recorder.start(trainer.accelerator)
    batches = itertools.repeat(samples_of(trainer.task, 16 if first else 4))
    steps = 1 if first else steps
    loop.run_steps(trainer, batches, steps, recorder, lambda _step, _samples: None)
    return loop.resolve_losses(recorder.losses)


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam", "resnet50"])
def test_channels_last_computes_the_same_in_two_and_three_dimensions(workload):
    plain, moved = trainer_of(workload), trainer_of(workload, channels_last=True)
    weight = next(
        weight for weight in moved.model.parameters() if weight.ndim > 3 and min(weight.shape[1:]) > 1
    )
    form = torch.channels_last_3d if weight.ndim == 5 else torch.channels_last

    assert weight.is_contiguous(memory_format=form)
    assert losses_of(moved) == pytest.approx(losses_of(plain), rel=2e-3)


@pytest.mark.parametrize("workload", sorted(TINY))
def test_bf16_agrees_with_fp32_within_its_precision(workload):
    assert losses_of(trainer_of(workload, precision="bf16")) == pytest.approx(
        losses_of(trainer_of(workload)), rel=0.05, abs=0.02
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_fused_optimizer_trains_like_the_plain_one(optimizer):
    fused = trainer_of("language_model", optimizer=optimizer, fused_optimizer=True)
    plain = trainer_of("language_model", optimizer=optimizer, fused_optimizer=False)

    assert fused.optimizer.defaults["fused"] is True
    assert losses_of(fused) == pytest.approx(losses_of(plain), rel=1e-4)


def test_no_field_leaves_the_choice_to_torch():
    assert trainer_of("language_model").optimizer.defaults["fused"] is None


def test_an_optimizer_that_this_torch_cannot_fuse_is_named_with_the_way_out():
    def old(_parameters, **options):
        raise TypeError(f"__init__() got an unexpected keyword argument {next(iter(options))!r}")

    old.__name__ = "SGD"

    with pytest.raises(
        WorkerFailure, match=r"fused_optimizer: torch .* has no fused SGD .* set fused_optimizer=False"
    ) as caught:
        optimizers._of_torch(old, torch.nn.Linear(1, 1), {"fused": True})

    assert caught.value.outcome == "not_supported"


def test_a_mistake_of_another_option_is_not_blamed_on_fusing():
    with pytest.raises(TypeError):
        optimizers._of_torch(torch.optim.SGD, torch.nn.Linear(1, 1), {"lr": 0.1, "speed": 2})


def test_fp16_on_a_cpu_scales_the_loss_if_asked_and_leaves_it_finite():
    scaled = trainer_of("language_model", precision="fp16", loss_scale=1024.0)
    assert scaled.scaler is not None
    assert trainer_of("language_model", precision="fp16").scaler is None

    losses = losses_of(scaled, steps=8)

    assert scaled.scaler.get_scale() == 1024.0  # no gradient was infinite, and it grows after 2,000 steps
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(losses_of(trainer_of("language_model"), steps=8), rel=0.05)


def test_a_scale_that_is_too_large_is_halved_and_that_step_is_left_out():
    made = trainer_of("language_model", precision="fp16", loss_scale=2.0**40)

    losses = losses_of(made, steps=3)

    assert made.scaler.get_scale() == 2.0**37
    assert losses[0] == losses[-1]  # weights stay until gradients are finite
    assert all(math.isfinite(loss) for loss in losses)


def test_a_torch_that_scales_on_cuda_alone_says_so(monkeypatch):
    monkeypatch.delattr(torch.amp, "GradScaler")

    with pytest.raises(WorkerFailure, match=r"not_supported: precision=fp16: torch .* on CUDA devices alone"):
        loop.grad_scaler("xpu", "fp16")


def test_a_torch_without_a_compiler_says_which_one_has_it(monkeypatch):
    monkeypatch.delattr(torch.nn.Module, "compile")

    with pytest.raises(
        WorkerFailure, match=r"not_supported: compile='default': torch .* cannot compile a model in place"
    ):
        trainer_of("language_model", compile="default")


def test_a_compiler_that_fails_is_told_with_its_own_words_and_what_is_needed(monkeypatch):
    def broken(*_arguments, **_options):
        raise OSError("cc1plus:\n   no such file")

    monkeypatch.setattr(torch, "compile", broken)

    with pytest.raises(
        WorkerFailure, match=r"cannot compile on this node for cpu: cc1plus: no such file\. On CPUs it needs"
    ):
        compiled.require("default", Cpu(0, "test"))


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one():
    made = trainer_of("language_model", compile="default")

    assert made.model._compiled_call_impl is not None
    assert losses_of(made) == pytest.approx(losses_of(trainer_of("language_model")), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        *((name, "fp32") for name in sorted(TINY)),
        *((name, "bf16") for name in sorted(TINY) if name != "resnet50"),
    ],
)
def test_each_workload_compiles_and_agrees(workload, precision):
    fields = {"precision": precision, "channels_last": workload != "language_model"}

    compiled_losses = losses_of(trainer_of(workload, compile="default", **fields))

    assert compiled_losses == pytest.approx(losses_of(trainer_of(workload)), rel=0.05, abs=0.02)


def test_the_time_for_compiling_is_what_steps_took_beyond_the_usual():
    second = 1_000_000_000
    stamps = [(0, 0, 0, 0, 0, took * second) for took in (21, 2, 2, 3)]

    (figure,) = rank.compile_figures(stamps)

    assert (figure.name, figure.unit, figure.better) == ("compile_time", "s", "lower")
    assert figure.value == pytest.approx(18.5 + 0.5)  # the median is 2.5
    assert rank.compile_figures(stamps[:2]) == ()


def two_ranks(folder, **changes):
    """Train the tiny language model on two real ranks over gloo; their reports in order."""
    known = next(one for one in WORKLOADS if one.name == "language_model")
    parameters = parameters_of(known, "smoke", global_batch=8, **TINY["language_model"], **changes)
    run = run_plan(
        workload="language_model", parameters=parameters, variables={}, ranks=2, launcher="torchrun", steps=3,
        warmup_steps=3, time_limit_s=280.0,
    )  # fmt: skip
    folder.mkdir()
    port = str(free_port())
    with Batch(str(folder / "channel")) as batch:
        started = [
            start_rank(
                batch, run, folder,
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in started:
            try:
                process.wait(280)  # what they write fits into a pipe
            except subprocess.TimeoutExpired:
                break
        assert [code for code, _ in finish(*started)] == [0, 0]
        return sorted(batch.reports(), key=lambda report: report.rank)


@pytest.mark.slow
def test_compiled_ranks_exchange_gradients_as_plain_ones_do(tmp_path):
    plain = two_ranks(tmp_path / "plain")
    made = two_ranks(tmp_path / "compiled", compile="default", fused_optimizer=True)

    for before, after in zip(plain, made, strict=True):
        assert after.losses == pytest.approx(before.losses, rel=1e-3)
        assert after.exposed_communication_s is not None
    assert [figure.name for figure in made[0].figures].count("compile_time") == 1
    assert "compile_time" not in [figure.name for figure in plain[0].figures]
