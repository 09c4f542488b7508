"""The fake NVML answers under the names of the real nvidia-ml-py, and refuses what that would refuse."""

from __future__ import annotations

import pynvml
import pytest
from fake_nvml import FILLING, KEYS, MADE, FakeNvml


@pytest.mark.parametrize("name", sorted({*KEYS, *MADE, *FILLING}))
def test_every_function_with_an_answer_of_its_own_is_a_real_one(name: str) -> None:
    assert callable(getattr(pynvml, name))


def test_what_the_specification_does_not_say_is_not_supported() -> None:
    fake = FakeNvml({"count": 1})
    fake.nvmlInit()
    with pytest.raises(fake.NVMLError_NotSupported):
        fake.nvmlDeviceGetName(fake.nvmlDeviceGetHandleByIndex(0))


def test_nothing_is_answered_before_it_is_initialised() -> None:
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        FakeNvml({"count": 1}).nvmlDeviceGetCount()


def test_a_function_takes_what_the_real_one_takes() -> None:
    fake = FakeNvml({"count": 1})
    fake.nvmlInit()
    with pytest.raises(TypeError):
        fake.nvmlDeviceGetNvLinkState(fake.nvmlDeviceGetHandleByIndex(0))
