"""What the workloads compute: losses, quality, shapes, causality."""

import math
from typing import Any

import pytest
from probe_ranks import NAMED, task_of
from tables import table

torch = pytest.importorskip("torch")

from pytest_mlhpc.node.worker.base import Task  # noqa: E402 - likewise
from pytest_mlhpc.node.worker.workloads import cosmoflow, deepcam, language_model  # noqa: E402 - behind importorskip
from pytest_mlhpc.node.worker.workloads.fields import OPTIMIZERS  # noqa: E402 - likewise
from pytest_mlhpc.node.worker.workloads.optimizers import Lamb, Lars  # noqa: E402 - likewise

TABLES = table("workloads")
TRAINING = [workload.name for workload in NAMED.values() if workload.module and not workload.probe]


def batch(made: Task, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stored batch within the task's bounds."""
    generator = torch.Generator().manual_seed(0)

    def values(spec: Any, low: float, high: float) -> torch.Tensor:
        shape = (size, *spec.shape)
        if spec.dtype.is_floating_point:
            return low + (high - low) * torch.rand(shape, generator=generator, dtype=spec.dtype)
        return torch.randint(int(low), int(high), shape, generator=generator).to(spec.dtype)

    targets = values(made.target, 0, made.classes or 1)
    return values(made.input, made.low, made.high), targets


def run_once(made: Task, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs, targets = made.prepare(*batch(made, size))
    scores = made.model()(inputs)
    return scores, made.loss(scores, targets)


@pytest.mark.parametrize("name", TRAINING)
def test_two_models_of_one_seed_are_equal(name):
    made = task_of(name)
    first, second = ([torch.manual_seed(7), made.model().state_dict()][1] for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_channels_last_reaches_weights_and_inputs():
    made = task_of("deepcam", channels_last=True)
    tensors = made.prepare(*batch(made, 2))[0], next(made.model().parameters())
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "expected"),
    [
        (task_of("cosmoflow").loss, [[1.0, 2.0, 3.0, 4.0]], [[0.0, 2.0, 1.0, 4.0]], (1 + 4) / 4),
        (
            deepcam.weighted_loss(), [[[[2.0, 0.0]], [[0.0, 1.0]], [[-1.0, 3.0]]]], [[[0, 1]]],
            # What is the class of each pixel with its weight, and the probability that the scores give it.
            sum(-(share**-0.125) * math.log(probability) for share, probability in (
                (0.986267818390377, math.exp(2) / (math.exp(2) + 1 + math.exp(-1))),
                (0.0004578708870701058, math.exp(1) / (1 + math.exp(1) + math.exp(3))),
            )) / 2,
        ),
        (task_of("resnet50", classes=4, label_smoothing=0.1).loss, [[0.0] * 4], [2], math.log(4)),
    ],
    ids=["squares", "pixels weighted by their class", "classes with a share of smoothing"],
)  # fmt: skip
def test_the_loss_is_the_mean_of(loss, outputs, targets, expected):
    assert loss(torch.tensor(outputs), torch.tensor(targets)).item() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "changes", "shape"), TABLES["shapes"])
def test_edges_of_all_sizes_are_fine(name, changes, shape):
    assert list(run_once(task_of(name, **changes))[0].shape) == shape


@pytest.mark.parametrize(("name", "changes", "text"), TABLES["refused"])
def test_fields_that_do_not_fit_are_refused(name, changes, text):
    with pytest.raises(ValueError, match=text):
        task_of(name, **changes)


class TestCosmoFlow:
    def test_counts_are_moved_to_the_front_and_become_logarithms(self):
        made = task_of("cosmoflow", input_size=32)
        counts, targets = batch(made, 1)
        inputs, same = made.prepare(counts, targets)
        assert inputs.shape == (1, 4, 32, 32, 32)
        assert inputs[0, 2, 3, 4, 5].item() == pytest.approx(math.log(1 + counts[0, 3, 4, 5, 2].item()))
        assert torch.equal(same, targets)

    def test_the_output_reaches_1_2_and_no_further(self):
        torch.manual_seed(0)
        model = cosmoflow.CosmoFlow(kernel_size=3, input_size=4, layers=2, base_channels=2, dropout=0.0)
        model.head[-1].bias.data.copy_(torch.tensor([100.0, -100.0, 0.0, 0.0]))
        model.head[-1].weight.data.zero_()
        assert model(torch.zeros(1, 4, 4, 4, 4))[0].tolist() == pytest.approx([1.2, -1.2, 0.0, 0.0])

    def test_an_even_kernel_keeps_the_edge_by_padding_its_far_end(self):
        model = cosmoflow.CosmoFlow(kernel_size=2, input_size=4, layers=1, base_channels=2, dropout=0.0)
        padding, convolution = model.features[0], model.features[1]
        convolution.weight.data.fill_(1.0)
        convolution.bias.data.zero_()
        out = convolution(padding(torch.ones(1, 4, 4, 4, 4)))
        assert out.shape[2:] == (4, 4, 4)
        assert (out[0, 0, 0, 0, 0].item(), out[0, 0, 3, 3, 3].item()) == (4 * 8, 4)

    def test_biases_start_at_zero_and_weights_within_glorots_bound(self):
        first = task_of("cosmoflow", base_channels=8).model().features[0]
        assert not first.bias.any()
        assert first.weight.abs().max().item() <= math.sqrt(6 / ((4 + 8) * 27))


class TestDeepCam:
    @pytest.mark.parametrize(
        ("predicted", "labels", "iou"),
        [
            ([[[0, 0, 1, 1]]], [[[0, 1, 1, 1]]], (1 / 2 + 2 / 3 + 1) / 3),
            ([[[0, 1, 2, 0]], [[0, 0, 0, 0]]], [[[0, 1, 2, 0]], [[2, 2, 2, 2]]], (1 + 1 / 3) / 2),
        ],
        ids=["absent classes are whole", "samples are averaged, not pixels"],
    )
    def test_iou_is_the_mean_of_classes_and_samples(self, predicted, labels, iou):
        scores = torch.nn.functional.one_hot(torch.tensor(predicted), 3).movedim(-1, 1).float()
        assert deepcam.mean_iou(scores, torch.tensor(labels)).item() == pytest.approx(iou)

    def test_adam_has_the_references_epsilon(self):
        made = task_of("deepcam")
        assert made.optimizer(made.model()).defaults["eps"] == 1e-6


class TestResNet50:
    def test_pixels_are_normalised_by_imagenets_mean(self):
        mean = torch.tensor([123.675, 116.28, 103.53]).round().to(torch.uint8)
        pixels = mean.expand(1, 64, 64, 3).contiguous()
        inputs, _ = task_of("resnet50").prepare(pixels, torch.tensor([3]))
        assert inputs.shape == (1, 3, 64, 64)
        assert inputs.abs().max().item() < 0.02

    def test_the_stride_is_in_the_3x3_convolution(self):
        layers = task_of("resnet50").model().stages.modules()
        strided = [m.kernel_size for m in layers if isinstance(m, torch.nn.Conv2d) and m.stride == (2, 2)]
        assert sorted(strided) == [(1, 1)] * 3 + [(3, 3)] * 3


class TestLanguageModel:
    @pytest.mark.parametrize(
        "changes", [{}, {"architecture": "llama"}, {"architecture": "llama", "kv_heads": 2}]
    )
    def test_a_later_token_changes_nothing_before_it(self, changes):
        torch.manual_seed(0)
        model = task_of("language_model", layers=2, context=16, **changes).model().eval()
        tokens = torch.randint(0, 256, (1, 16))
        other = tokens.clone()
        other[0, 10] = (other[0, 10] + 1) % 256
        first, second = model(tokens), model(other)
        torch.testing.assert_close(first[:, :10], second[:, :10])
        assert not torch.allclose(first[:, 10:], second[:, 10:])

    def test_explicit_and_fused_attention_agree(self):
        torch.manual_seed(0)
        query_key_value = torch.randn(3, 2, 4, 9, 8)
        fused, explicit = (
            language_model.DotProduct(fused=fused)(*query_key_value) for fused in (True, False)
        )
        torch.testing.assert_close(fused, explicit)

    def test_rotation_depends_on_distance_alone(self):
        torch.manual_seed(0)
        turn = language_model.Rotary(8, 32)(32, torch.device("cpu"))
        query, key = torch.randn(8), torch.randn(8)
        queries = language_model.rotate(query.expand(1, 1, 32, 8), turn)[0, 0]
        keys = language_model.rotate(key.expand(1, 1, 32, 8), turn)[0, 0]
        torch.testing.assert_close(queries[5] @ keys[2], queries[25] @ keys[22])
        assert not torch.isclose(queries[5] @ keys[2], queries[5] @ keys[3])

    def test_a_new_model_is_as_unsure_as_can_be(self):
        assert run_once(task_of("language_model"))[1].item() == pytest.approx(math.log(256), rel=0.05)

    @pytest.mark.parametrize(("architecture", "shared"), [("gpt2", True), ("llama", False)])
    def test_gpt2_shares_its_embedding_and_llama_does_not(self, architecture, shared):
        model = task_of("language_model", architecture=architecture).model()
        assert (model.head.weight is model.embedding.weight) == shared

    @pytest.mark.parametrize(("vocabulary", "dtype"), [(50257, torch.int32), (256, torch.uint8)])
    def test_a_large_vocabulary_travels_as_int32(self, vocabulary, dtype):
        assert task_of("language_model", vocabulary=vocabulary).input.dtype == dtype


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_each_one_makes_a_quadratic_smaller(self, name):
        made = task_of("cosmoflow", optimizer=name, learning_rate=0.5 if name == "lars" else 0.01)
        model = torch.nn.Linear(4, 4)
        optimizer = made.optimizer(model)
        values = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        assert values[-1] < values[0]

    # |w| = 6, |g| = 10. LARS moves each element by 0.01 * 6 / 10 * 5. LAMB's first direction is 1 everywhere (norm 2): by 0.1 * 6 / 2.
    @pytest.mark.parametrize(
        ("optimizer", "fields", "step"),
        [(Lars, {"lr": 1.0, "momentum": 0.0, "trust": 0.01}, 0.03), (Lamb, {"lr": 0.1}, 0.3)],
    )
    def test_a_matrix_moves_by_its_trust_ratio(self, optimizer, fields, step):
        weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
        weight.grad = torch.full((2, 2), 5.0)
        optimizer([weight], **fields).step()
        assert weight[0, 0].item() == pytest.approx(3.0 - step, rel=1e-5)

    def test_lamb_moves_every_tensor_as_the_reference_does(self):
        """Norms after 20 steps by timm 1.0.9's ``Lamb``, which has the rule of apex' ``FusedLAMB``, in float64."""

        def numbers(shape, offset):
            count = torch.tensor(shape).prod().item()
            return torch.tensor(
                [((7 * i + offset) % 11 - 5) / 10 for i in range(count)], dtype=torch.float64
            ).reshape(shape)

        net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
        ).double()
        for index, weight in enumerate(net.parameters()):
            if index not in (2, 3):
                weight.data = numbers(weight.shape, index)
        inputs, targets = numbers((8, 3), 1), numbers((8, 2), 2)
        optimizer = Lamb(net.parameters(), lr=0.02, weight_decay=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            (net(inputs) - targets).square().mean().backward()
            optimizer.step()
        norms = [weight.norm().item() for weight in net.parameters()]
        expected = [1.22797878, 0.47676745, 1.97857197, 0.04744539, 0.87261004, 0.29248876]
        assert norms == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("name", ["lars", "lamb"])
    def test_a_weight_without_gradient_or_of_zeros_stays_sane(self, name):
        model = torch.nn.Linear(2, 2)
        model.weight.data.zero_()
        optimizer = task_of("cosmoflow", optimizer=name).optimizer(model)
        optimizer.step()
        model.weight.grad = torch.zeros(2, 2)
        optimizer.step()
        assert not model.weight.any()

    @pytest.mark.parametrize("name", ["lars", "lamb"])
    def test_state_survives_saving(self, name):
        made = task_of("cosmoflow", optimizer=name)
        model = torch.nn.Linear(2, 2)
        optimizer = made.optimizer(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        again = made.optimizer(model)
        again.load_state_dict(optimizer.state_dict())
        assert str(again.state_dict()) == str(optimizer.state_dict())
