import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import example

FLOATS = st.lists(st.floats(width=32, allow_nan=False).map(float), min_size=1, max_size=9)
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9)
BYTES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)
FEATURES = st.dictionaries(st.text(max_size=9), st.one_of(FLOATS, INTS, BYTES), max_size=4)


@given(FEATURES)
def test_what_was_encoded_comes_back(features):
    decoded = example.decode(example.encode(features))
    assert {
        name: [bytes(v) if isinstance(v, memoryview) else v for v in values]
        for name, values in decoded.items()
    } == features


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data):
    with contextlib.suppress(example.DecodeError):
        example.decode(data)


@settings(max_examples=300)
@given(FEATURES, st.data())
def test_mutated_examples_decode_or_are_refused(features, data):
    raw = bytearray(example.encode(features) + b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(example.DecodeError):
        example.decode(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_bytes_are_those_that_protobuf_writes():
    # Example{features{feature{key:"y" value{float_list{value:1.0}}}}}, by the encoding rules of protobuf
    assert example.encode({"y": [1.0]}) == bytes.fromhex("0a0f0a0d0a0179120812060a040000803f")


def test_unpacked_lists_of_old_writers_are_read():
    # float_list { value: 1.0 value: 2.0 }, each with its own tag (wire type 5); int64_list { value: 3 }
    floats = bytes.fromhex("0a130a110a0179120c120a0d0000803f0d00000040")
    assert example.decode(floats)["y"] == [1.0, 2.0]
    ints = bytes.fromhex("0a0b0a090a017912041a020803")
    assert example.decode(ints)["y"] == [3]


def test_a_field_beyond_the_end_is_told():
    with pytest.raises(example.DecodeError, match="a field of 99 bytes begins 0 bytes before the end"):
        example.decode(b"\x0a\x63")
