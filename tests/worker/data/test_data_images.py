import io
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pytest_mlhpc.worker.data import fields, images
from pytest_mlhpc.worker.data.errors import DataError

SHAPE = (32, 32, 3)


def picture(path, height=60, width=80):
    images.write_sample(path, fields.picture(0, 0, height, width, 1))
    return path


def refused(path, text):
    with pytest.raises(DataError) as caught:
        images.read_sample(path, SHAPE, "center", 0)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


@pytest.mark.parametrize("crop", images.CROPS)
def test_a_picture_comes_out_in_the_asked_size(tmp_path, crop):
    pixels = images.read_sample(picture(tmp_path / "a.JPEG"), SHAPE, crop, 3)
    assert pixels.shape == SHAPE
    assert pixels.dtype == np.uint8


def test_a_random_crop_depends_on_its_seed_alone(tmp_path):
    path = picture(tmp_path / "a.JPEG")
    first, again, other = (images.read_sample(path, SHAPE, "random", seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_the_middle_is_what_center_cuts_out(tmp_path):
    canvas = np.zeros((80, 120, 3), np.uint8)
    canvas[5:75, 25:95] = 200  # 70 = 7/8 of 80, in the middle
    images.write_sample(tmp_path / "a.JPEG", canvas)
    assert images.read_sample(tmp_path / "a.JPEG", SHAPE, "center", 0).min() > 150


@pytest.mark.parametrize("mode", ["L", "CMYK", "P"])
def test_grey_and_cmyk_and_palettes_become_rgb(tmp_path, mode):
    path = tmp_path / "a.png"
    Image.new("RGB", (40, 40), (9, 99, 199)).convert(mode).save(path, "JPEG" if mode == "CMYK" else "PNG")
    assert images.read_sample(path, SHAPE, "center", 0).shape == SHAPE


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_crops_lie_inside_pictures_of_any_size(width, height, seed):
    rng = random.Random(seed)  # noqa: S311 - crops are no secrets
    boxes = images._random_box(rng, width, height), images._middle_box(width, height, 7 / 8)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_an_empty_file_is_told(tmp_path):
    (tmp_path / "a.JPEG").touch()
    refused(tmp_path / "a.JPEG", "is empty, expected a JPEG picture")


def test_a_picture_cut_short_is_told(tmp_path):
    path = picture(tmp_path / "a.JPEG")
    path.write_bytes(path.read_bytes()[:500])
    refused(path, "cannot be decoded")


def test_an_image_bomb_is_refused_undecoded(tmp_path):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(99)))
        + chunk(b"IEND", b"")
    )
    refused(path, "60000")


def test_other_formats_are_not_even_tried(tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (40, 40)).save(out, "GIF")
    (tmp_path / "a.JPEG").write_bytes(out.getvalue())
    refused(tmp_path / "a.JPEG", "cannot be decoded")


def test_classes_follow_the_order_of_folder_names(tmp_path):
    files = [tmp_path / name / "a.JPEG" for name in ("n02", "n01", "n10", "n01")]
    assert images.classes_of(tmp_path, files, 10) == [1, 0, 2, 0]


def test_more_folders_than_classes_are_told(tmp_path):
    files = [tmp_path / name / "a.JPEG" for name in "abc"]
    with pytest.raises(DataError, match="has 3 class folders, the model tells 2 classes apart"):
        images.classes_of(tmp_path, files, 2)


def test_a_picture_outside_class_folders_is_told(tmp_path):
    with pytest.raises(DataError, match="lies in no class folder"):
        images.classes_of(tmp_path, [tmp_path / "a.JPEG"], 2)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_pictures_decode_or_are_refused_with_one_kind_of_error(tmp_path, data):
    path = picture(tmp_path / "a.JPEG")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.one_of(st.integers(0, 700), st.integers(0, len(raw) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        found = images.read_sample(path, SHAPE, data.draw(st.sampled_from(images.CROPS)), 0).shape
    except DataError as error:
        found = error.path
    assert found in (SHAPE, str(path))
