import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of CRC-32C
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_published_values_come_out(data, expected):
    assert crc32c.crc32c(data) == expected


@pytest.mark.parametrize("length", [2047, 2048, 2049, 4096, 65_537, 1 << 20, (1 << 20) + 1023])
def test_lanes_give_what_the_plain_loop_gives(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c.crc32c(data) == crc32c._step(0xFFFFFFFF, data) ^ 0xFFFFFFFF


@settings(max_examples=30)
@given(st.integers(0, 8191), st.integers(1, 255))
def test_one_changed_byte_changes_the_value(place, change):
    data = bytearray(np.random.default_rng(7).bytes(8192))
    before = crc32c.crc32c(data)
    data[place] ^= change
    assert crc32c.crc32c(data) != before
