"""MLPerf HPC at its own size, on systems that have the data: `features: [mlperf_hpc]` of a partition, and in `datasets:`
entries called cosmoflow and deepcam with train and validation folders.

One run is not a result: the rules want ten of CosmoFlow and five of DeepCAM, each with a seed of its own.
"""

import pytest

from pytest_mlhpc import train


@train(
    "cosmoflow", until="quality", data="cosmoflow", cache="cold", staging="files", staging_share="node",
    input_size=128, layers=5, base_channels=32, global_batch=64, requires="mlperf_hpc -wse", time_limit="24h",
)  # fmt: skip
@pytest.mark.parametrize("seed", range(1, 11))
def test_cosmoflow(run, baseline):
    assert run >= baseline


@train(
    "deepcam", until="quality", data="deepcam", cache="cold", staging="files", staging_share="node", height=768, width=1152,
    width_multiplier=1.0, middle_blocks=16, global_batch=128, optimizer="lamb", learning_rate=1e-3,
    requires="mlperf_hpc -wse", time_limit="24h",
    schedule={"kind": "multistep", "by": "steps", "milestones": [8192, 16384], "factors": [0.1, 0.01]},
)  # fmt: skip
@pytest.mark.parametrize("seed", range(1, 6))
def test_deepcam(run, baseline):
    assert run >= baseline
