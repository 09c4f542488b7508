import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import cosmoflow_hdf5, deepcam_hdf5, fields
from pytest_mlhpc.worker.data.errors import DataError

CUBE = (8, 8, 8, 4)
FIELD = (16, 32, 16)
ONES = (np.zeros(16, np.float32), np.ones(16, np.float32))


def volume(path):
    x, y = fields.volume(0, 0, 8)
    cosmoflow_hdf5.write_sample(path, x, y)
    return x, y


def climate(path):
    data, labels = fields.climate(0, 0, 16, 32)
    deepcam_hdf5.write_sample(path, data, labels)
    return data, labels


def read_volume(path):
    return cosmoflow_hdf5.read_sample(path, CUBE, 4)


def read_climate(path):
    return deepcam_hdf5.read_sample(path, FIELD, *ONES, 3)


def store(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace("__", "/")] = array


def refused(read, path, text):
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


def test_a_cosmoflow_sample_comes_back(tmp_path):
    x, y = volume(tmp_path / "a.hdf5")
    found = read_volume(tmp_path / "a.hdf5")
    assert (found[0] == x).all()
    assert (found[1] == y).all()
    assert found[0].dtype == np.int16


@pytest.mark.parametrize("names", [("x", "y"), ("full", "unitPar")])
@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.uint8])
def test_channels_first_and_other_numbers_are_brought_into_one_form(tmp_path, names, dtype):
    x, y = fields.volume(0, 0, 8)
    x = np.minimum(x, 255)
    store(
        tmp_path / "a.h5", **{names[0]: np.moveaxis(x, -1, 0).astype(dtype), names[1]: y.astype(np.float64)}
    )
    found = read_volume(tmp_path / "a.h5")
    assert (found[0] == x).all()
    assert found[0].dtype == np.int16
    assert found[1].dtype == np.float32


def test_normalised_values_are_refused(tmp_path):
    store(tmp_path / "a.h5", x=np.full(CUBE, 0.5, np.float32), y=np.zeros(4, np.float32))
    refused(read_volume, tmp_path / "a.h5", "expected whole numbers")


def test_counts_beyond_int16_are_refused(tmp_path):
    store(tmp_path / "a.h5", x=np.full(CUBE, 40_000, np.int32), y=np.zeros(4, np.float32))
    refused(read_volume, tmp_path / "a.h5", "expected numbers that fit into int16")


def test_an_uncut_simulation_is_refused_by_its_shape(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("full", (512, 512, 512, 4), "i2", chunks=(64, 64, 64, 4))  # takes no room
        file["unitPar"] = np.zeros(4)
    refused(read_volume, tmp_path / "a.h5", "full is 512x512x512x4, expected 8x8x8x4 or 4x8x8x8")


def test_a_file_of_something_else_is_told(tmp_path):
    store(tmp_path / "a.h5", images=np.zeros(3))
    refused(read_volume, tmp_path / "a.h5", "has neither x nor full, expected one of them; it has ['images']")


def test_a_deepcam_sample_comes_back_normalised(tmp_path):
    data, labels = climate(tmp_path / "a.h5")
    deepcam_hdf5.write_stats(tmp_path / "stats.h5", *fields.climate_bounds())
    shift, scale = deepcam_hdf5.read_stats(tmp_path / "stats.h5", 16)
    found = deepcam_hdf5.read_sample(tmp_path / "a.h5", FIELD, shift, scale, 3)
    assert (found[1] == labels).all()
    assert 0 <= found[0].min() < found[0].max() <= 1
    low, high = fields.climate_bounds()
    assert np.allclose(found[0], (data - low) / (high - low), atol=1e-6)


def test_the_layout_is_the_published_one(tmp_path):
    climate(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["climate/data"].dtype == np.float32
        assert file["climate/data"].shape == FIELD
        assert file["climate/labels_0"].dtype == np.int64
        assert file["climate/labels_0"].shape == FIELD[:2]


def test_equal_samples_are_equal_files(tmp_path):
    for name in ("a.h5", "b.h5"):
        climate(tmp_path / name)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_missing_dataset_is_told(tmp_path):
    store(tmp_path / "a.h5", climate__data=np.zeros(FIELD, np.float32))
    refused(read_climate, tmp_path / "a.h5", "has no dataset climate/labels_0, expected one of 16x32")


def test_a_group_in_place_of_a_dataset_is_told(tmp_path):
    store(tmp_path / "a.h5", climate__data__x=np.zeros(3))
    refused(read_climate, tmp_path / "a.h5", "has no dataset climate/data")


def test_another_shape_is_told(tmp_path):
    store(tmp_path / "a.h5", climate__data=np.zeros((16, 16, 16), np.float32))
    refused(read_climate, tmp_path / "a.h5", "climate/data is 16x16x16, expected 16x32x16")


def test_text_in_place_of_numbers_is_told(tmp_path):
    store(tmp_path / "a.h5", climate__data=np.full(FIELD, b"x"))
    refused(read_climate, tmp_path / "a.h5", "climate/data holds |S1, expected numbers")


def test_a_class_that_does_not_exist_is_told(tmp_path):
    store(tmp_path / "a.h5", climate__data=np.zeros(FIELD, "f4"), climate__labels_0=np.full(FIELD[:2], 3))
    refused(read_climate, tmp_path / "a.h5", "climate/labels_0 holds 3 to 3, expected 0 to 2")


def test_stats_that_cannot_scale_are_told(tmp_path):
    path = tmp_path / "stats.h5"
    deepcam_hdf5.write_stats(path, np.zeros(16, "f4"), np.zeros(16, "f4"))
    refused(lambda where: deepcam_hdf5.read_stats(where, 16), path, "climate/maxval must be finite and above")


@pytest.mark.parametrize(("content", "text"), [(b"", "is empty"), (b"no hdf5" * 99, "is damaged or no HDF5")])
@pytest.mark.parametrize("read", [read_volume, read_climate])
def test_no_hdf5_is_told(tmp_path, content, text, read):
    (tmp_path / "a.h5").write_bytes(content)
    refused(read, tmp_path / "a.h5", text)


def test_a_missing_file_is_told(tmp_path):
    refused(read_climate, tmp_path / "a.h5", "No such file or directory")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999), which=st.sampled_from([(volume, read_volume), (climate, read_climate)]))
def test_a_file_cut_short_is_refused_with_one_kind_of_error(tmp_path, share, which):
    write, read = which
    path = tmp_path / "a.h5"
    write(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    refused(read, path, "expected a")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), which=st.sampled_from([(volume, read_volume), (climate, read_climate)]))
def test_damaged_files_are_read_or_refused_with_one_kind_of_error(tmp_path, data, which):
    write, read = which
    path = tmp_path / "a.h5"
    write(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        found = len(read(path))
    except DataError as error:
        found = error.path
    assert found in (2, str(path))
