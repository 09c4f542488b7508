"""Fields of arithmetic on this machine's cores, for real: what they compute agrees with the plain path."""

import functools
import itertools
import math

import pytest
import torch
from probe_ranks import run_ranks, smoke
from rank_helpers import run_plan

from pytest_mlhpc.node.worker import loop, prepare, rank
from pytest_mlhpc.node.worker.accelerators import cpu
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Recorder
from pytest_mlhpc.node.worker.workloads import optimizers

pytestmark = pytest.mark.servers  # trainings

#: Sizes at which a step of each workload takes milliseconds.
TINY = {
    "cosmoflow": {"input_size": 16, "layers": 3, "base_channels": 4, "dropout": 0.0},
    "deepcam": {"height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1},
    "resnet50": {"image_size": 64, "classes": 4},
    "language_model": {"layers": 2, "hidden": 32, "heads": 2, "context": 16, "vocabulary": 256},
}
LANGUAGE_MODEL = smoke("language_model", **TINY["language_model"])


def trainer_of(workload="language_model", **changes):
    parameters = smoke(workload, **{**TINY[workload], **changes})
    run = run_plan(workload=workload, parameters=parameters, variables={})
    torch.manual_seed(1)
    return prepare.build(run, prepare.load_task(run), Group(), Cpu(0, "test"), 1)


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
    loop.run_steps(trainer, batches, 1 if first else steps, recorder, lambda _step, _samples: None)
    return loop.resolve_losses(recorder.losses)


@functools.cache
def plain_losses(workload="language_model", steps=4):
    return losses_of(trainer_of(workload), steps)


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam", "resnet50"])
def test_channels_last_computes_the_same_in_two_and_three_dimensions(workload):
    moved = trainer_of(workload, channels_last=True)
    weight = next(one for one in moved.model.parameters() if one.ndim > 3 and min(one.shape[1:]) > 1)
    form = torch.channels_last_3d if weight.ndim == 5 else torch.channels_last

    assert weight.is_contiguous(memory_format=form)
    assert losses_of(moved) == pytest.approx(plain_losses(workload), rel=2e-3)


@pytest.mark.parametrize("workload", sorted(TINY))
def test_bf16_agrees_with_fp32_within_its_precision(workload):
    losses = losses_of(trainer_of(workload, precision="bf16"))
    assert losses == pytest.approx(plain_losses(workload), rel=0.05, abs=0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_fused_optimizer_trains_like_the_plain_one(optimizer):
    made = [trainer_of(optimizer=optimizer, fused_optimizer=one) for one in (True, False, None)]
    assert [one.optimizer.defaults["fused"] for one in made] == [True, False, None]  # None leaves it to torch
    assert losses_of(made[0]) == pytest.approx(losses_of(made[1]), rel=1e-4)


def test_an_optimizer_that_this_torch_cannot_fuse_is_named_with_the_way_out():
    def SGD(_parameters):  # noqa: N802 - torch's name
        raise AssertionError("it takes no option called fused")

    text = r"not_supported: fused_optimizer: torch .* has no fused SGD .* set fused_optimizer=False"
    with pytest.raises(WorkerFailure, match=text):
        optimizers._of_torch(SGD, torch.nn.Linear(1, 1), {"fused": True})


def test_a_mistake_of_another_option_is_not_blamed_on_fusing():
    with pytest.raises(TypeError):
        optimizers._of_torch(torch.optim.SGD, torch.nn.Linear(1, 1), {"lr": 0.1, "speed": 2})


def test_fp16_on_a_cpu_scales_the_loss_if_asked_and_leaves_it_finite():
    scaled = trainer_of(precision="fp16", loss_scale=1024.0)
    assert scaled.scaler is not None
    assert trainer_of(precision="fp16").scaler is None

    losses = losses_of(scaled, steps=8)

    assert scaled.scaler.get_scale() == 1024.0  # no gradient was infinite, and it grows after 2,000 steps
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(plain_losses(steps=8), rel=0.05)


def test_a_scale_that_is_too_large_is_halved_and_that_step_is_left_out():
    made = trainer_of(precision="fp16", loss_scale=2.0**40)

    losses = losses_of(made, steps=3)

    assert made.scaler.get_scale() == 2.0**37
    assert losses[0] == losses[-1]  # weights stay until gradients are finite
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("owner", "name", "use", "text"),
    [
        (torch.amp, "GradScaler", lambda: loop.grad_scaler("xpu", "fp16"), "precision=fp16: torch .* on CUDA devices alone"),
        (
            torch.nn.Module, "compile", lambda: trainer_of(compile="default"),
            "compile='default': torch .* cannot compile a model in place",
        ),
    ],
    ids=["scaling", "a compiler"],
)  # fmt: skip
def test_a_torch_that_lacks_something_says_so(monkeypatch, owner, name, use, text):
    monkeypatch.delattr(owner, name)

    with pytest.raises(WorkerFailure, match=f"not_supported: {text}"):
        use()


def test_a_compiler_that_fails_is_named_with_its_own_text_and_what_is_needed(monkeypatch):
    def broken(*_arguments, **_options):
        raise OSError("cc1plus:\n   no such file")

    monkeypatch.setattr(torch, "compile", broken)

    text = r"cannot compile on this node for cpu: cc1plus: no such file\. On CPUs it needs"
    with pytest.raises(WorkerFailure, match=text):
        cpu.require("default", Cpu(0, "test"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        (name, form)
        for name in sorted(TINY)
        for form in ("fp32", "bf16")
        if (name, form) != ("resnet50", "bf16")
    ],
)
def test_each_workload_compiles_and_agrees(workload, precision):
    fields = {"precision": precision, "channels_last": workload != "language_model"}

    made = trainer_of(workload, compile="default", **fields)
    assert made.model._compiled_call_impl is not None
    near = 1e-3 if (workload, precision) == ("language_model", "fp32") else 0.05
    assert losses_of(made) == pytest.approx(plain_losses(workload), rel=near, abs=0.4 * near)


def test_the_time_for_compiling_is_what_steps_took_beyond_the_usual():
    stamps = [(0, 0, 0, 0, 0, took * 1_000_000_000) for took in (21, 2, 2, 3)]

    (figure,) = rank.compile_figures(stamps)

    assert (figure.name, figure.unit, figure.better) == ("compile_time", "s", "lower")
    assert figure.value == pytest.approx(18.5 + 0.5)  # the median is 2.5
    assert rank.compile_figures(stamps[:2]) == ()


@pytest.mark.slow
def test_compiled_ranks_exchange_gradients_as_plain_ones_do(rank_server, tmp_path):
    def reports(name, **changes):
        parameters = {**LANGUAGE_MODEL, "global_batch": 8, **changes}
        run = run_plan(
            workload="language_model", parameters=parameters, variables={}, ranks=2, launcher="torchrun", steps=3,
            warmup_steps=3,
        )  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        done = run_ranks(rank_server, folder, run)
        assert [code for code, _ in done.ended] == [0, 0]
        return sorted(done.batch.reports(), key=lambda report: report.rank)

    plain, made = reports("plain"), reports("compiled", compile="default", fused_optimizer=True)

    for before, after in zip(plain, made, strict=True):
        assert after.losses == pytest.approx(before.losses, rel=1e-3)
        assert after.exposed_communication_s is not None
    assert [figure.name for figure in made[0].figures].count("compile_time") == 1
    assert "compile_time" not in [figure.name for figure in plain[0].figures]
