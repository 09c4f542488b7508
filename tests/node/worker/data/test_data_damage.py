"""A damaged sample of any format is read, or refused with one kind of error that names its file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.worker.data import formats, make, tfrecord
from pytest_mlhpc.node.worker.data.dataset_files import DataError

VOLUME = make.make_volume(0, 0, 8)
STATS = (np.zeros(16, np.float32), np.ones(16, np.float32))


def exactly(found, sample):
    return (found == sample).all()


def in_shape(found, sample):
    return found.shape == sample.shape


@pytest.fixture(
    scope="module",
    params=[
        (
            lambda path: tfrecord.write_sample(path, *VOLUME, compress=True),
            lambda path: tfrecord.read_sample(path, (8, 8, 8, 4), 4)[0], exactly,
        ),
        (
            lambda path: tfrecord.write_sample(path, *VOLUME, compress=False),
            lambda path: tfrecord.read_sample(path, (8, 8, 8, 4), 4)[0], exactly,
        ),
        (
            lambda path: formats.write_cosmoflow(path, *VOLUME),
            lambda path: formats.read_cosmoflow(path, (8, 8, 8, 4), 4)[0], in_shape,
        ),
        (
            lambda path: formats.write_deepcam(path, *make.make_climate(0, 0, 16, 32)),
            lambda path: formats.read_deepcam(path, (16, 32, 16), *STATS, 3)[0], in_shape,
        ),
        (
            lambda path: formats.write_image(path, make.make_picture(0, 0, 60, 80, 1)),
            lambda path: formats.read_image(path, (32, 32, 3), "random", 0), in_shape,
        ),
    ],
    ids=["tfrecord-gzip", "tfrecord", "hdf5 of CosmoFlow", "hdf5 of DeepCAM", "images"],
)  # fmt: skip
def sample(request, tmp_path_factory):
    """Return the path of a sample, its bytes, how it is read, and whether that agrees."""
    write, read, agrees = request.param
    path = tmp_path_factory.mktemp("damage") / "sample"
    write(path)
    whole = read(path)
    return path, path.read_bytes(), read, lambda found: agrees(found, whole)


@given(data=st.data())
def test_damage_is_read_or_refused(sample, data):
    path, raw, read, agrees = sample
    damaged = bytearray(raw)
    places = st.integers(0, min(700, len(raw) - 1)) | st.integers(0, len(raw) - 1)
    for _ in range(data.draw(st.integers(0, 6))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(raw))) :]
    path.write_bytes(damaged)
    try:
        fine = agrees(read(path))
    except DataError as error:
        fine = str(error).startswith(str(path))
    assert fine
