"""HPC AI500's scaling by bagging: base models side by side, beside plain data parallelism on as many devices.

`mlhpc ai500` puts the rows together (docs/ai500.md).
"""

import pytest


@pytest.mark.train("cosmoflow", devices=4)
@pytest.mark.parametrize("bagging", [None, (2, 2), (4, 1)])
def test_cosmoflow_by_bagging(run, baseline):
    assert run >= baseline
