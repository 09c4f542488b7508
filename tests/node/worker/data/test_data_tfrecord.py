"""Samples in TFRecords, and what these are made of: a checksum, and examples as protobuf writes them."""

import contextlib
import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_sets import assert_refused
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from pytest_mlhpc.node.worker.data import tfrecord
from pytest_mlhpc.node.worker.data.dataset_files import DataError

SHAPE = (4, 4, 4, 4)
FLOATS = st.lists(st.floats(width=32, allow_nan=False).map(float), min_size=1, max_size=9)
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9)
BYTES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)
FEATURES = st.dictionaries(st.text(max_size=9), st.one_of(FLOATS, INTS, BYTES), max_size=4)


@pytest.mark.parametrize(("data", "checksum"), table("data_formats")["checksums"])
def test_the_published_checksums_come_out(data, checksum):
    assert tfrecord.crc32c(bytes.fromhex(data)) == checksum


@pytest.mark.parametrize("length", [2047, 2048, 2049, 4096, 65_537, (1 << 17) + 1023])
def test_lanes_give_what_the_plain_loop_gives(length):
    data = np.random.default_rng(length).bytes(length)
    assert tfrecord.crc32c(data) == tfrecord._step(0xFFFFFFFF, data) ^ 0xFFFFFFFF


@given(st.integers(0, 8191), st.integers(1, 255))
def test_one_changed_byte_changes_the_checksum(place, change):
    data = bytearray(np.random.default_rng(7).bytes(8192))
    before = tfrecord.crc32c(data)
    data[place] ^= change
    assert tfrecord.crc32c(data) != before


@given(FEATURES)
def test_what_was_encoded_comes_back(features):
    decoded = tfrecord.decode(tfrecord.encode(features))
    plain = {name: [bytes(v) if isinstance(v, memoryview) else v for v in decoded[name]] for name in decoded}
    assert plain == features


def mutate(draw, raw, most, head=0):
    """Change up to *most* bytes of *raw*, often in its *head*."""
    places = st.integers(0, head) | st.integers(0, len(raw) - 1)
    for _ in range(draw(st.integers(1, most))):
        raw[draw(places)] = draw(st.integers(0, 255))


@given(FEATURES, st.data(), st.binary(max_size=200))
def test_any_bytes_and_mutated_examples_decode_or_are_refused(features, data, noise):
    raw = bytearray(tfrecord.encode(features) + b"\0")
    mutate(data.draw, raw, 4)
    for encoded in (noise, bytes(raw[: data.draw(st.integers(0, len(raw)))])):
        with contextlib.suppress(tfrecord.DecodeError):
            tfrecord.decode(encoded)


def test_bytes_are_those_that_protobuf_writes():
    # Example{features{feature{key:"y" value{float_list{value:1.0}}}}}, by the encoding rules of protobuf
    assert tfrecord.encode({"y": [1.0]}).hex() == "0a0f0a0d0a0179120812060a040000803f"


@pytest.mark.parametrize(
    ("encoded", "values"),
    [("0a130a110a0179120c120a0d0000803f0d00000040", [1.0, 2.0]), ("0a0b0a090a017912041a020803", [3])],
    ids=["float_list, each value with its own tag (wire type 5)", "int64_list"],
)
def test_unpacked_lists_of_old_writers_are_read(encoded, values):
    assert tfrecord.decode(bytes.fromhex(encoded))["y"] == values


def test_a_field_beyond_the_end_is_refused():
    with pytest.raises(tfrecord.DecodeError, match="a field of 99 bytes begins 0 bytes before the end"):
        tfrecord.decode(b"\x0a\x63")


def sample():
    rng = np.random.default_rng(0)
    return rng.integers(-5, 300, SHAPE, dtype=np.int16), rng.random(4, dtype=np.float32)


def read(path):
    return tfrecord.read_sample(path, SHAPE, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.tfrecord"


@pytest.mark.parametrize("compress", [True, False])
def test_a_sample_comes_back(path, compress):
    tfrecord.write_sample(path, *sample(), compress=compress)
    x, y = read(path)
    assert np.array_equal(x, sample()[0])
    assert np.array_equal(y, sample()[1])
    assert (x.dtype, path.read_bytes()[:2] == b"\x1f\x8b") == (np.int16, compress)


def test_the_framing_is_that_of_tensorflow():
    raw = tfrecord.frame(b"abc")
    assert (raw[:8], raw[12:15]) == (struct.pack("<Q", 3), b"abc")
    # the mask as the format defines it, of the CRC's published value for these bytes
    crc = 0x364B3FB7
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    assert raw[15:] == struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def framed(x=None, y=(1.0, 2.0, 3.0, 4.0)):
    x = sample()[0] if x is None else x
    return tfrecord.frame(tfrecord.encode({"x": [x.tobytes()], "y": list(y)}))


def test_several_gzip_members_are_one_file(path):
    path.write_bytes(gzip.compress(framed()[:100]) + gzip.compress(framed()[100:]))
    assert (read(path)[0] == sample()[0]).all()


def flipped(raw, place):
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


def bomb():
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(20)) + packer.flush()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (lambda: gzip.compress(framed())[:-20], "gzip data is cut short"),
        (bytes, "is empty, expected one TFRecord"),
        (lambda: flipped(framed(), 200), "wrong CRC of the record's data"),
        (lambda: flipped(framed(), 9), "wrong CRC of the record's length"),
        (lambda: framed() * 2, "expected exactly one sample per file"),
        (lambda: framed(np.zeros((2, 2, 2, 4), np.int16)), "x: found 64 bytes, expected 512 (int16 4x4x4x4)"),
        (lambda: framed(y=(1.0, 2.0, 3.0)), "y: found 3 values, expected 4 floats"),
        (lambda: tfrecord.frame(tfrecord.encode({"z": [1]})), "has features ['z'], expected x (bytes) and y (4 floats)"),
        (bomb, "unpacks to more than"),
    ],
    ids=[
        "cut short", "empty", "wrong CRC of the data", "wrong CRC of the length", "two samples", "another shape",
        "another number of targets", "other features", "a gzip bomb before it unpacks",
    ],
)  # fmt: skip
def test_what_is_no_sample_is_refused(path, content, text):
    path.write_bytes(content())
    assert_refused(read, path, text)


def test_missing_and_huge_files_are_refused_unread(path):
    assert_refused(read, path, "No such file")
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert_refused(read, path, "a sample can have")


@given(data=st.data())
def test_damage_below_a_right_crc_is_refused_too(tmp_path: Path, data):
    raw = bytearray(tfrecord.encode({"x": [sample()[0].tobytes()], "y": [1.0, 2.0, 3.0, 4.0]}))
    mutate(data.draw, raw, 3, head=40)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(tfrecord.frame(bytes(raw)))
    try:
        whole = read(path)[0].shape == SHAPE
    except DataError as error:
        whole = str(path) in str(error)
    assert whole
