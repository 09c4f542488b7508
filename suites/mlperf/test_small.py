"""Time to train of small models on sets that are made for them: the whole way of MLPerf HPC in a minute of one core.

The targets are those of the benchmarks, the models and sets are not: their times compare with themselves alone.
"""

import pytest

from pytest_mlhpc import train

COSMOFLOW = {
    "input_size": 8, "layers": 2, "base_channels": 8, "dropout": 0.0, "learning_rate": 0.005,
    "schedule": {"kind": "constant"}, "global_batch": 8, "train_samples": 96, "eval_samples": 16, "max_epochs": 24,
}  # fmt: skip
DEEPCAM = {
    "height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1, "learning_rate": 0.005,
    "schedule": {"kind": "constant"}, "global_batch": 4, "train_samples": 48, "eval_samples": 8, "max_epochs": 24,
}  # fmt: skip


@train("cosmoflow", until="quality", data="files", seed=1, requires="-wse", **COSMOFLOW)
def test_cosmoflow(run, baseline):
    assert run["quality"].value <= 0.124
    assert run >= baseline


@train("deepcam", until="quality", data="files", seed=1, requires="-wse", **DEEPCAM)
def test_deepcam(run, baseline):
    assert run["quality"].value >= 0.82
    assert run >= baseline


@train("cosmoflow", until="quality", data="files", seed=1, requires="-wse", **COSMOFLOW)
@pytest.mark.parametrize("staging", ["files", "archives"])
def test_staged(run, baseline):
    assert 0 < run["staging_time"].value < run["time_to_train"].value
    assert run >= baseline
