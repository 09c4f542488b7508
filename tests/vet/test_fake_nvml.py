"""The fake NVML has what the real nvidia-ml-py has, by name, signature, number and layout."""

from __future__ import annotations

import ctypes
import inspect

import fake_nvml
import pynvml
import pytest

FAKE = fake_nvml.FakeNvml({"count": 1})


@pytest.mark.parametrize("name", fake_nvml.FUNCTIONS)
def test_a_function_takes_what_the_real_one_takes(name: str) -> None:
    def parameters(function: object) -> list[tuple[str, object]]:
        return [(one.name, one.default) for one in inspect.signature(function).parameters.values()]

    assert parameters(getattr(FAKE, name)) == parameters(getattr(pynvml, name))


@pytest.mark.parametrize("name", fake_nvml.CONSTANTS)
def test_a_constant_has_the_real_number(name: str) -> None:
    assert getattr(FAKE, name) == getattr(pynvml, name)


@pytest.mark.parametrize("structure", fake_nvml.STRUCTURES, ids=lambda one: one.__name__)
def test_a_structure_has_the_real_layout(structure: type[ctypes.Structure]) -> None:
    real = getattr(pynvml, structure.__name__)

    def layout(one: type) -> list[tuple[str, int, int]]:
        places = [(field[0], getattr(one, field[0])) for field in one._fields_]  # type: ignore[attr-defined] - of ctypes
        return [(name, place.offset, place.size) for name, place in places]

    assert layout(structure) == layout(real)
    assert ctypes.sizeof(structure) == ctypes.sizeof(real)


@pytest.mark.parametrize("name", fake_nvml.ERRORS)
def test_an_error_is_of_the_real_class(name: str) -> None:
    code = fake_nvml.ERRORS[name]
    fake, real = fake_nvml.NVMLError(code), pynvml.NVMLError(code)
    assert type(fake).__name__ == type(real).__name__
    assert hasattr(FAKE, type(real).__name__)
    assert isinstance(fake, FAKE.NVMLError)
    assert fake.value == real.value == code


def test_what_the_specification_does_not_say_is_not_supported() -> None:
    fake = fake_nvml.FakeNvml({"count": 1})
    fake.nvmlInit()
    with pytest.raises(fake.NVMLError_NotSupported):
        fake.nvmlDeviceGetName(fake.nvmlDeviceGetHandleByIndex(0))


def test_nothing_is_answered_before_it_is_initialised() -> None:
    with pytest.raises(FAKE.NVMLError_Uninitialized):
        FAKE.nvmlDeviceGetCount()
