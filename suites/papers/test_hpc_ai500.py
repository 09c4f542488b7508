"""HPC AI500's scaling by bagging: base models side by side, beside plain data parallelism on as many devices.

`mlhpc papers ai500` puts the rows together (docs/ai500.md).
"""

import pytest

from pytest_mlhpc import train


@train("cosmoflow", devices_per_node=4, requires="-wse")
@pytest.mark.parametrize("bagging", [None, (2, 2), (4, 1)])
def test_cosmoflow_by_bagging(run, baseline):
    assert run >= baseline
