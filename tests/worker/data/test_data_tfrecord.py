import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import crc32c, example, tfrecord
from pytest_mlhpc.worker.data.errors import DataError

SHAPE = (4, 4, 4, 4)


def sample(seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(-5, 300, SHAPE, dtype=np.int16), rng.random(4, dtype=np.float32)


def written(tmp_path, *, compress):
    path = tmp_path / "a.tfrecord"
    tfrecord.write_sample(path, *sample(), compress=compress)
    return path


def refused(path, text):
    with pytest.raises(DataError) as caught:
        tfrecord.read_sample(path, SHAPE, 4)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


def outcome(path):
    try:
        return tfrecord.read_sample(path, SHAPE, 4)
    except DataError as error:
        return error


@pytest.mark.parametrize("compress", [True, False])
def test_a_sample_comes_back(tmp_path, compress):
    path = written(tmp_path, compress=compress)
    x, y = tfrecord.read_sample(path, SHAPE, 4)
    assert (x == sample()[0]).all()
    assert (y == sample()[1]).all()
    assert x.dtype == np.int16
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == compress


def test_equal_samples_are_equal_files(tmp_path):
    (tmp_path / "other").mkdir()
    assert (
        written(tmp_path, compress=True).read_bytes()
        == written(tmp_path / "other", compress=True).read_bytes()
    )


def test_the_framing_is_that_of_tensorflow():
    raw = tfrecord.frame(b"abc")
    assert raw[:8] == struct.pack("<Q", 3)
    assert raw[12:15] == b"abc"
    # the mask as the format defines it, of the CRC's published value for these bytes
    crc = crc32c.crc32c(b"abc")
    assert crc == 0x364B3FB7
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    assert raw[15:] == struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def test_several_gzip_members_are_one_file(tmp_path):
    raw = tfrecord.frame(example.encode({"x": [sample()[0].tobytes()], "y": [1.0, 2.0, 3.0, 4.0]}))
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(raw[:100]) + gzip.compress(raw[100:]))
    assert (tfrecord.read_sample(path, SHAPE, 4)[0] == sample()[0]).all()


def test_a_truncated_gzip_is_told(tmp_path):
    path = written(tmp_path, compress=True)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, "gzip data is cut short")


def test_an_empty_file_is_told(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.touch()
    refused(path, "is empty, expected one TFRecord")


def test_a_missing_file_is_told(tmp_path):
    refused(tmp_path / "a.tfrecord", "No such file")


def test_a_wrong_crc_of_the_data_is_told(tmp_path):
    path = written(tmp_path, compress=False)
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    refused(path, "wrong CRC of the record's data")


def test_a_wrong_crc_of_the_length_is_told(tmp_path):
    path = written(tmp_path, compress=False)
    raw = bytearray(path.read_bytes())
    raw[9] ^= 1
    path.write_bytes(raw)
    refused(path, "wrong CRC of the record's length")


def test_two_samples_in_a_file_are_told(tmp_path):
    path = written(tmp_path, compress=False)
    path.write_bytes(path.read_bytes() * 2)
    refused(path, "expected exactly one sample per file")


def test_another_shape_is_told(tmp_path):
    path = tmp_path / "a.tfrecord"
    tfrecord.write_sample(path, np.zeros((2, 2, 2, 4), np.int16), np.zeros(4, np.float32), compress=False)
    refused(path, "x: found 64 bytes, expected 512 (int16 4x4x4x4)")


def test_another_number_of_targets_is_told(tmp_path):
    path = tmp_path / "a.tfrecord"
    tfrecord.write_sample(path, sample()[0], np.zeros(3, np.float32), compress=False)
    refused(path, "y: found 3 values, expected 4 floats")


def test_missing_features_are_told(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(tfrecord.frame(example.encode({"z": [1]})))
    refused(path, "has features ['z'], expected x (bytes) and y (4 floats)")


def test_a_gzip_bomb_is_refused_before_it_unpacks(tmp_path):
    path = tmp_path / "a.tfrecord"
    packer = zlib.compressobj(9, wbits=31)
    path.write_bytes(b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush())
    refused(path, "unpacks to more than")


def test_a_huge_plain_file_is_refused_unread(tmp_path):
    path = tmp_path / "a.tfrecord"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    refused(path, "a sample can have")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), compress=st.booleans())
def test_damaged_files_are_refused_with_one_kind_of_error(tmp_path: Path, data, compress):
    path = written(tmp_path, compress=compress)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    found = outcome(path)
    assert str(path) in str(found) if isinstance(found, DataError) else (found[0] == sample()[0]).all()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_below_a_right_crc_is_refused_too(tmp_path: Path, data):
    raw = bytearray(example.encode({"x": [sample()[0].tobytes()], "y": [1.0, 2.0, 3.0, 4.0]}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(raw) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    path = tmp_path / "a.tfrecord"
    path.write_bytes(tfrecord.frame(bytes(raw)))
    found = outcome(path)
    assert str(path) in str(found) if isinstance(found, DataError) else found[0].shape == SHAPE
