"""Which block of a model begins on which IPU: consecutive, even, and in the order in which the model really runs."""

import itertools

import poptorch_stand_in
import pytest
import torch
from probe_ranks import task_of

from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.accelerators.ipu import Begin, apply, balance, begins, tied, units
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers  # trainings


def sample(task, count=2):
    shapes = ((task.input.shape, task.input.dtype), (task.target.shape, task.target.dtype))
    return task.prepare(*(torch.zeros((count, *shape), dtype=dtype) for shape, dtype in shapes))[0]


variants = pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cosmoflow", {}), ("cosmoflow", {"kernel_size": 2}), ("deepcam", {"height": 48, "width": 48}),
        ("resnet50", {"image_size": 32}), ("language_model", {}), ("language_model", {"architecture": "llama"}),
    ],
)  # fmt: skip


@variants
def test_units_are_the_whole_model_in_the_order_in_which_it_runs(name, changes):
    task = task_of(name, **changes)
    model = task.model()
    found, ran = units(model, name), []
    for unit in found:
        model.get_submodule(unit).register_forward_pre_hook(lambda *_, unit=unit: ran.append(unit))
    with torch.no_grad():
        model(sample(task))
    assert ran == found
    inside = {id(one) for unit in found for one in model.get_submodule(unit).parameters()}
    assert inside == {id(one) for one in model.parameters()}


@pytest.mark.parametrize(
    ("costs", "parts", "firsts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]), ([9, 1, 1, 1], 2, [0, 1]), ([1, 1, 1, 9], 3, [0, 1, 3]), ([5], 1, [0]),
        ([0, 0, 0], 3, [0, 1, 2]), ([1, 2, 3, 4, 5, 6], 3, [0, 3, 5]),
    ],
)  # fmt: skip
def test_costs_are_cut_evenly_and_no_part_is_empty(costs, parts, firsts):
    found = balance(costs, parts)

    def dearest(cuts):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([*cuts, len(costs)]))

    rest = range(1, len(costs))
    assert dearest(found) == dearest(firsts)
    assert dearest(found) == min(dearest((0, *cuts)) for cuts in itertools.combinations(rest, parts - 1))
    assert found == sorted(set(found))
    assert len(found) == parts


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "resnet50", "language_model"])
def test_reference_sizes_are_split_over_four_ipus(name):
    task = task_of(name, "reference")
    with reporting.on_meta():
        model = task.model()
    layers, shared = reporting.by_layer(task), tied(model)
    assert sum(layers.values()) == reporting.count(task).forward
    plan = begins(units(model, name), layers, 4, shared)
    assert [begin.ipu for begin in plan][:3] == [1, 2, 3]
    assert (plan[-1] == Begin("head", 0)) == (name == "language_model")
    names = units(model, name)
    within = [[one for one in layers if f"{one}.".startswith(f"{unit}.")] for unit in names]
    costs = [sum(layers[layer] for layer in unit) for unit in within]
    assert sum(costs) == sum(layers.values())
    cuts = [0, *(names.index(begin.name) for begin in plan), len(names)]
    shares = [sum(costs[first:last]) for first, last in itertools.pairwise(cuts)]
    assert max(shares) <= max(*costs, sum(costs) / 2)


def test_a_head_that_shares_its_weights_goes_back_to_the_first_ipu():
    shared = ("embedding", "head")
    models = [task_of("language_model", architecture=one).model() for one in ("gpt2", "llama")]
    assert [tied(model) for model in models] == [shared, ("", "")]
    cut = ["embedding", "a", "b", "head"], {"a.x": 5, "b": 5, "head": 1}
    assert begins(*cut, 2, shared) == (Begin("b", 1), Begin("head", 0))
    assert (begins(*cut, 2), begins(*cut, 1, shared)) == ((Begin("b", 1),), ())


@variants
def test_blocks_run_on_their_ipus_in_the_order_of_the_plan(name, changes):
    task = task_of(name, **changes)
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.no_grad():
        before = model(sample(task))
        plan = begins(units(model, name), reporting.by_layer(task), 4, tied(model))
        module = poptorch_stand_in.poptorch()
        apply(module, model, plan)
        after = model(sample(task))
    assert torch.equal(before, after)
    assert module.BeginBlock.ran == [(f"block{number}", begin.ipu) for number, begin in enumerate(plan, 1)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: begins(["a", "b"], {}, 4), "^not_supported: ipus_per_replica=4: the model has 2 parts"),
        (
            lambda: units(torch.nn.Linear(1, 1), "tiny"),
            "only cosmoflow, deepcam, resnet50, language_model can be spread",
        ),
    ],
)
def test_fewer_parts_than_ipus_and_unknown_models_are_refused(call, text):
    with pytest.raises(WorkerFailure, match=text):
        call()
