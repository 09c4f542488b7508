import io
import random
import struct
import zlib

import numpy as np
import pytest
from data_sets import assert_refused
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pytest_mlhpc.node.worker.data import formats, make
from pytest_mlhpc.node.worker.data.dataset_files import DataError

SHAPE = (32, 32, 3)


def read(path, crop="center", seed=0):
    return formats.read_image(path, SHAPE, crop, seed)


@pytest.fixture
def path(tmp_path):
    """Return the path of a picture."""
    formats.write_image(tmp_path / "a.JPEG", make.make_picture(0, 0, 60, 80, 1))
    return tmp_path / "a.JPEG"


def test_a_random_crop_depends_on_its_seed_alone(path):
    first, again, other = (read(path, "random", seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_the_middle_is_what_center_cuts_out(path):
    canvas = np.zeros((80, 120, 3), np.uint8)
    canvas[5:75, 25:95] = 200  # 70 = 7/8 of 80, in the middle
    formats.write_image(path, canvas)
    assert read(path).min() > 150


def encoded(form, mode="RGB"):
    out = io.BytesIO()
    Image.new("RGB", (40, 40), (9, 99, 199)).convert(mode).save(out, form)
    return out.getvalue()


@pytest.mark.parametrize("crop", formats.CROPS)
@pytest.mark.parametrize(("mode", "form"), [("RGB", "JPEG"), ("L", "PNG"), ("CMYK", "JPEG"), ("P", "PNG")])
def test_pictures_of_any_mode_become_rgb_of_the_asked_size(path, mode, form, crop):
    path.write_bytes(encoded(form, mode))
    pixels = read(path, crop, 3)
    assert (pixels.shape, pixels.dtype) == (SHAPE, np.uint8)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_crops_lie_inside_pictures_of_any_size(width, height, seed):
    rng = random.Random(seed)  # noqa: S311 - crops are no secrets
    boxes = formats._random_box(rng, width, height), formats._middle_box(width, height, 7 / 8)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def bomb():
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (bytes, "is empty, expected a JPEG picture"),
        (lambda: encoded("JPEG")[:500], "cannot be decoded"),
        (bomb, "60000"),
        (lambda: encoded("GIF"), "cannot be decoded"),
    ],
    ids=["empty", "cut short", "a bomb, undecoded", "another format"],
)
def test_what_is_no_picture_is_refused(path, content, text):
    path.write_bytes(content())
    assert_refused(read, path, text)


def test_classes_follow_the_order_of_folder_names(tmp_path):
    files = [tmp_path / name / "a.JPEG" for name in ("n02", "n01", "n10", "n01")]
    assert formats.classes_of(tmp_path, files, 10) == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["a/a.JPEG", "b/a.JPEG", "c/a.JPEG"], "has 3 class folders, the model tells 2 classes apart"),
        (["a.JPEG"], "lies in no class folder"),
    ],
)
def test_pictures_without_a_class_are_refused(tmp_path, files, text):
    with pytest.raises(DataError, match=text):
        formats.classes_of(tmp_path, [tmp_path / name for name in files], 2)
