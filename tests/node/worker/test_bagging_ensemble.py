"""How good an ensemble is, by workload, on predictions made by hand; and how its ranks learn of each other."""

import io
import json
import math

import pytest
import torch
from tiny_workload import task_like

from pytest_mlhpc.node.worker import ensemble, ensemble_process
from pytest_mlhpc.node.worker.base import TensorSpec
from pytest_mlhpc.node.worker.distributed import Group


def score(name, shape=(), classes=0):
    return ensemble.score_of(task_like(name, target=TensorSpec(shape, torch.int64), classes=classes))


@pytest.mark.parametrize(
    ("score", "outputs", "targets", "qualities"),
    [
        (score("resnet50", classes=3), [[0.0, 2, 1], [5, 0, 0]], [1, 2], [1.0, 0.0]),
        # Overlap is the mean over classes, and a class that is nowhere counts one.
        (score("deepcam", (1, 4), 3), [[[[1.0, 0, 0, 0]], [[0, 1, 1, 1]], [[0, 0, 0, 0]]]], [[[0, 0, 1, 1]]],
         [(1 / 2 + 2 / 3 + 1) / 3]),
        (score("language_model", (2,), 4), [[[0.0] * 4] * 2], [[1, 3]], [math.log(4)]),
        (score("cosmoflow", (2,)), [[1.0, 3.0]], [[0.0, 1.0]], [1.5]),
        (score("mine", (2,)), [[1.0, 3.0], [0, 0]], [[0.0, 1.0], [0, 0]], [2.5, 0.0]),
    ],
    ids=["the likeliest class", "overlap", "the logarithm of the probability", "absolute error", "loss of others"],
)  # fmt: skip
def test_a_workload_is_judged_by(score, outputs, targets, qualities):
    outputs, targets = torch.tensor(outputs), torch.tensor(targets)
    found = score.quality(score.predict(outputs, targets), targets).tolist()
    assert found == pytest.approx(qualities)


def test_more_right_answers_are_better():
    assert score("resnet50", classes=3).better == "higher"


def test_a_prediction_of_text_is_one_probability_for_each_character():
    judged = score("language_model", (2,), 4)
    assert judged.predict(torch.zeros(1, 2, 4), torch.tensor([[1, 3]])).shape == (1, 2)


def test_the_mean_of_probabilities_outvotes_an_unsure_base_model():
    judged, targets = score("resnet50", classes=2), torch.tensor([0])
    sure, unsure = (judged.predict(torch.tensor([output]), targets) for output in ([4.0, 0.0], [0.0, 0.1]))
    assert judged.quality((sure + unsure) / 2, targets).tolist() == [1.0]


def test_fewer_samples_are_validated_where_predictions_are_large_or_samples_few():
    large, small = score("deepcam", (768, 1152), 3), score("cosmoflow", (4,))
    asked = [(small, 4, 100_000), (small, 4, 160), (large, 1, 100_000), (small, 1000, 8)]
    assert [ensemble.held_out_of_a_rank(*one) for one in asked] == [64, 10, 6, 1]


def four(each=2):
    """Return what the ranks of two base models have in their hands, by one store."""
    store = ensemble._Alone()
    return [ensemble.EnsembleStore(store, Group(rank, rank, 4), each) for rank in range(4)]


@pytest.mark.parametrize(
    "steps",
    [
        [("ready", 1), ("ready", 2), ("ready", 3), ("ready", 0)],
        [("ready", 2), ("fail", 3), ("ready", 0), ("ready", 1)],
    ],
    ids=["all are ready", "all are whose base model has not failed"],
)
def test_nobody_begins_before(steps):
    ranks = four()
    for step, rank in steps:
        assert not ranks[0].may_begin()
        ranks[rank].fail(("worker_killed", "gone")) if step == "fail" else ranks[rank].ready()
    assert all(rank.may_begin() for rank in ranks)


def test_what_became_of_all_is_known_when_all_have_ended():
    ranks = four()
    ranks[1].fail(("worker_killed", "gone"))
    ranks[0].fail(("worker_exit", "connection closed"))  # it only lost its peer
    for rank in ranks[1:]:
        rank.ended()
        assert ranks[0].outcome() is None
    ranks[0].ended()
    assert all(rank.outcome() == {0: ("worker_killed", "gone")} for rank in ranks)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_are_whole_however_the_pipe_cuts_them(size):
    file = io.BytesIO()
    torch.save((torch.arange(3.0), torch.arange(2)), file)
    head = {"kind": "predictions", "body": {"distinct": 0.5}, "bytes": file.tell()}
    data = json.dumps(head).encode() + b"\n" + file.getvalue() + b'{"kind": "report"}\n'
    messages, found = ensemble_process.Messages(), []
    for start in range(0, len(data), size):
        found += messages.feed(data[start : start + size])

    assert [message.kind for message in found] == ["predictions", "report"]
    assert (found[0].body, found[0].tensors[0].tolist()) == ({"distinct": 0.5}, [0.0, 1.0, 2.0])


def test_what_is_no_message_is_refused():
    with pytest.raises(ValueError, match="Expecting value"):
        list(ensemble_process.Messages().feed(b"Segmentation fault\n"))
