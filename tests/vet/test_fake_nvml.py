"""The fake NVML answers under the names of the real nvidia-ml-py."""

from __future__ import annotations

import pynvml
import pytest
from fake_nvml import FILLING, KEYS, MADE


@pytest.mark.parametrize("name", sorted({*KEYS, *MADE, *FILLING}))
def test_every_function_with_an_answer_of_its_own_is_a_real_one(name: str) -> None:
    assert callable(getattr(pynvml, name))
