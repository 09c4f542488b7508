"""How good an ensemble is, by workload, on predictions made by hand; and how its ranks learn of each other."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from pytest_mlhpc.worker.bagging import ensemble, meeting, process  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.distributed import Group  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.workloads.base import Task, TensorSpec  # noqa: E402 - behind importorskip


def score(name, shape=(), classes=0):
    task = Task(
        name=name,
        model=torch.nn.Identity,
        prepare=lambda inputs, targets: (inputs, targets),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        input=TensorSpec((4,), torch.float32),
        target=TensorSpec(shape, torch.int64),
        classes=classes,
    )
    return ensemble.score_of(task)


def qualities(judged, outputs, targets):
    return judged.quality(judged.predict(outputs, targets), targets).tolist()


def test_a_class_counts_if_it_is_the_likeliest():
    judged = score("resnet50", classes=3)

    assert qualities(judged, torch.tensor([[0.0, 2, 1], [5, 0, 0]]), torch.tensor([1, 2])) == [1.0, 0.0]
    assert judged.better == "higher"


def test_the_mean_of_probabilities_outvotes_an_unsure_base_model():
    judged = score("resnet50", classes=2)
    sure, unsure = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.1]])
    targets = torch.tensor([0])

    mean = (judged.predict(sure, targets) + judged.predict(unsure, targets)) / 2

    assert judged.quality(mean, targets).tolist() == [1.0]


def test_overlap_is_the_mean_over_classes_and_a_class_that_is_nowhere_counts_one():
    judged = score("deepcam", (1, 4), 3)
    targets = torch.tensor([[[0, 0, 1, 1]]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 1]]]), 3).movedim(-1, 1).float()

    assert qualities(judged, outputs, targets) == pytest.approx([(1 / 2 + 2 / 3 + 1) / 3])


def test_text_is_judged_by_the_logarithm_of_the_mean_probability():
    judged = score("language_model", (2,), 4)
    targets = torch.tensor([[1, 3]])

    assert qualities(judged, torch.zeros(1, 2, 4), targets) == pytest.approx([math.log(4)])
    assert judged.predict(torch.zeros(1, 2, 4), targets).shape == (1, 2)


def test_numbers_are_judged_by_their_absolute_error():
    judged = score("cosmoflow", (2,))

    assert qualities(judged, torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])) == [1.5]


def test_other_workloads_are_judged_by_their_own_loss():
    judged = score("mine", (2,))

    assert qualities(judged, torch.tensor([[1.0, 3.0], [0, 0]]), torch.tensor([[0.0, 1.0], [0, 0]])) == [
        2.5,
        0.0,
    ]


def test_fewer_samples_are_held_out_where_predictions_are_large_or_samples_few():
    large, small = score("deepcam", (768, 1152), 3), score("cosmoflow", (4,))

    assert ensemble.held_out_of_a_rank(small, 4, 100_000) == 64
    assert ensemble.held_out_of_a_rank(small, 4, 160) == 10
    assert ensemble.held_out_of_a_rank(large, 1, 100_000) == 6
    assert ensemble.held_out_of_a_rank(small, 1000, 8) == 1


class Shared:
    """A store as several ranks see it."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key].encode()

    def check(self, keys):
        return all(key in self.values for key in keys)


def four(each=2):
    store = Shared()
    return [meeting.Meeting(store, Group(rank, rank, 4), each) for rank in range(4)]


def test_nobody_begins_before_all_are_ready():
    ranks = four()

    for rank in ranks[1:]:
        rank.ready()
        assert not ranks[0].may_begin()
    ranks[0].ready()

    assert ranks[0].may_begin()
    assert all(rank.may_begin() for rank in ranks)


def test_nobody_waits_for_a_base_model_that_has_failed():
    ranks = four()
    ranks[2].ready()
    ranks[3].fail(("worker_killed", "gone"))
    ranks[0].ready()
    assert not ranks[0].may_begin()
    ranks[1].ready()

    assert ranks[0].may_begin()


def test_what_became_of_all_is_known_when_all_have_ended():
    ranks = four()
    ranks[1].fail(("worker_killed", "gone"))
    ranks[0].fail(("worker_exit", "connection closed"))  # it only lost its peer
    for rank in ranks[1:]:
        rank.ended()
        assert ranks[0].outcome() is None
    ranks[0].ended()

    assert ranks[0].outcome() == {0: ("worker_killed", "gone")}
    assert all(rank.outcome() == {0: ("worker_killed", "gone")} for rank in ranks)


def said(*lines):
    return [json.dumps(line).encode() + b"\n" for line in lines]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_are_whole_however_the_pipe_cuts_them(size):
    import io

    file = io.BytesIO()
    torch.save((torch.arange(3.0), torch.arange(2)), file)
    head, tail = said(
        {"kind": "predictions", "body": {"distinct": 0.5}, "bytes": file.tell()}, {"kind": "report"}
    )
    data = head + file.getvalue() + tail
    messages, found = process.Messages(), []
    for start in range(0, len(data), size):
        found += messages.feed(data[start : start + size])

    assert [one.kind for one in found] == ["predictions", "report"]
    assert found[0].tensors[0].tolist() == [0.0, 1.0, 2.0]


def test_what_is_no_message_is_refused():
    with pytest.raises(ValueError, match="Expecting value"):
        list(process.Messages().feed(b"Segmentation fault\n"))
