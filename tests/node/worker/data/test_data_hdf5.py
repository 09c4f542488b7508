import h5py
import numpy as np
import pytest
from data_sets import assert_refused

from pytest_mlhpc.node.worker.data import formats, make

CUBE = (8, 8, 8, 4)
FIELD = (16, 32, 16)
ONES = (np.zeros(16, np.float32), np.ones(16, np.float32))


def volume(path):
    x, y = make.make_volume(0, 0, 8)
    formats.write_cosmoflow(path, x, y)
    return x, y


def climate(path):
    data, labels = make.make_climate(0, 0, 16, 32)
    formats.write_deepcam(path, data, labels)
    return data, labels


def read_volume(path):
    return formats.read_cosmoflow(path, CUBE, 4)


def read_climate(path):
    return formats.read_deepcam(path, FIELD, *ONES, 3)


def read_stats(path):
    return formats.read_stats(path, 16)


def store(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


def test_a_cosmoflow_sample_comes_back(path):
    x, y = volume(path)
    found = read_volume(path)
    assert np.array_equal(found[0], x)
    assert np.array_equal(found[1], y)
    assert found[0].dtype == np.int16


@pytest.mark.parametrize("names", [("x", "y"), ("full", "unitPar")])
@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.uint8])
def test_channels_first_and_other_numbers_are_brought_into_one_form(path, names, dtype):
    x, y = make.make_volume(0, 0, 8)
    x = np.minimum(x, 255)
    store(path, {names[0]: np.moveaxis(x, -1, 0).astype(dtype), names[1]: y.astype(np.float64)})
    found = read_volume(path)
    assert (found[0] == x).all()
    assert (found[0].dtype, found[1].dtype) == (np.int16, np.float32)


def test_a_deepcam_sample_comes_back_normalised(path, tmp_path):
    data, labels = climate(path)
    low, high = make.climate_bounds()
    formats.write_stats(tmp_path / "stats.h5", low, high)
    found = formats.read_deepcam(path, FIELD, *read_stats(tmp_path / "stats.h5"), 3)
    assert (found[1] == labels).all()
    assert 0 <= found[0].min() < found[0].max() <= 1
    assert np.allclose(found[0], (data - low) / (high - low), atol=1e-6)


def test_the_layout_is_the_published_one_and_equal_samples_are_equal_files(path, tmp_path):
    climate(path)
    climate(tmp_path / "b.h5")
    with h5py.File(path) as file:
        data, labels = file["climate/data"], file["climate/labels_0"]
        assert (data.dtype, data.shape) == (np.float32, FIELD)
        assert (labels.dtype, labels.shape) == (np.int64, FIELD[:2])
    assert path.read_bytes() == (tmp_path / "b.h5").read_bytes()


ZEROS = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("read", "arrays", "text"),
    [
        (read_volume, {"x": np.full(CUBE, 0.5, np.float32), "y": ZEROS}, "expected whole numbers"),
        (read_volume, {"x": np.full(CUBE, 40_000), "y": ZEROS}, "expected numbers that fit into int16"),
        (read_volume, {"images": ZEROS}, "has neither x nor full, expected one of them; it has ['images']"),
        (read_climate, {"climate/data": np.zeros(FIELD, "f4")}, "has no dataset climate/labels_0, expected one of 16x32"),
        (read_climate, {"climate/data/x": ZEROS}, "has no dataset climate/data"),
        (read_climate, {"climate/data": np.zeros((16, 16, 16), "f4")}, "climate/data is 16x16x16, expected 16x32x16"),
        (read_climate, {"climate/data": np.full(FIELD, b"x")}, "climate/data holds |S1, expected numbers"),
        (
            read_climate, {"climate/data": np.zeros(FIELD, "f4"), "climate/labels_0": np.full(FIELD[:2], 3)},
            "climate/labels_0 holds 3 to 3, expected 0 to 2",
        ),
        (read_stats, {"climate/minval": ONES[0], "climate/maxval": ONES[0]}, "climate/maxval must be finite and above"),
    ],
    ids=[
        "normalised values", "counts beyond int16", "something else", "no labels", "a group for a dataset",
        "another shape", "text for numbers", "a class that does not exist", "stats that cannot scale",
    ],
)  # fmt: skip
def test_what_is_no_sample_is_refused(path, read, arrays, text):
    store(path, arrays)
    assert_refused(read, path, text)


def test_an_uncut_simulation_is_refused_unread(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("full", (512, 512, 512, 4), "i2", chunks=(64, 64, 64, 4))  # takes no room
        file["unitPar"] = ZEROS
    assert_refused(read_volume, path, "full is 512x512x512x4, expected 8x8x8x4 or 4x8x8x8")


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "is empty"), (b"no hdf5" * 99, "is damaged or no HDF5"), (None, "No such file or directory")],
)
@pytest.mark.parametrize("read", [read_volume, read_climate])
def test_no_hdf5_is_refused(path, content, text, read):
    if content is not None:
        path.write_bytes(content)
    assert_refused(read, path, text)
