"""Evaluation by two real ranks (gloo, CPU): one model, whatever each rank's normalisation has averaged last."""

import pytest
from probe_ranks import sabotaged
from rank_helpers import run_plan

pytestmark = pytest.mark.servers

#: The metric is what the model says: a sample of ones, less the mean of its normalisation.
RANK = """
import os
from types import SimpleNamespace
import torch
from pytest_mlhpc.node.worker import distributed
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.quality.train import evaluate

group, cpu = distributed.from_environment(os.environ), open_device("cpu", 0)
distributed.join(group, cpu, 60.0)
model = torch.nn.BatchNorm1d(1, eps=0.0)
model.running_mean.fill_(0.25 + group.rank)
task = SimpleNamespace(prepare=lambda inputs, targets: (inputs, targets))
trainer = SimpleNamespace(model=model, accelerator=cpu, precision="fp32", task=task)
batch = (torch.ones(2, 1), torch.zeros(2), 0)
found = evaluate(trainer, [batch], 2, lambda answers, _: answers.mean(1), group)
print(found.quality, found.samples, model.training, flush=True)
os._exit(0)
"""


def test_ranks_evaluate_the_first_ones_model(ranks, tmp_path):
    ended = ranks(run_plan(ranks=2), **sabotaged(tmp_path, RANK)).ended
    assert [(code, output.split()) for code, output in ended] == [(0, ["0.75", "4", "True"])] * 2
