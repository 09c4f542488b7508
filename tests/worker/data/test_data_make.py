import gzip
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_mlhpc.worker.data import deepcam_hdf5, learnable, make, tfrecord
from pytest_mlhpc.worker.data.errors import DataError
from pytest_mlhpc.worker.data.files import digest, list_files
from pytest_mlhpc.worker.data.layout import Layout, layout_of
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

KNOWN = {workload.name: workload for workload in WORKLOADS}
ALL = [
    ("cosmoflow", "tfrecord-gzip"),
    ("cosmoflow", "tfrecord"),
    ("cosmoflow", "hdf5"),
    ("deepcam", "hdf5"),
    ("resnet50", "images"),
]


def layout(workload, form="", *, preset="smoke", samples=4, validation=1, seed=0) -> Layout:
    parameters = parameters_of(KNOWN[workload], preset)
    return layout_of(workload, parameters, samples=samples, validation=validation, seed=seed, form=form)


def contents(root):
    return {path.relative_to(root).as_posix(): digest(path) for path in list_files(root)}


@pytest.mark.parametrize(("workload", "form"), ALL)
def test_equal_seeds_make_equal_files_and_other_seeds_others(tmp_path, workload, form):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make.make_set(layout(workload, form, seed=seed), tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    same = set(contents(tmp_path / "a").items()) & set(contents(tmp_path / "c").items())
    assert {name for name, _ in same} <= {"stats.h5"}


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        ("cosmoflow", {"train": 4, "validation": 1}),
        ("deepcam", {"train": 4, "validation": 1, "stats.h5": 1}),
        ("resnet50", {"train": 4, "val": 1}),
    ],
)
def test_folders_are_those_of_the_real_sets(tmp_path, workload, names):
    manifest, made = make.make_set(layout(workload), tmp_path / "set")
    found = [path.relative_to(tmp_path / "set").parts[0] for path in list_files(tmp_path / "set")]
    assert {name: found.count(name) for name in set(found)} == names
    assert made
    assert manifest.files == sum(names.values())


def test_training_and_validation_share_no_sample(tmp_path):
    make.make_set(layout("cosmoflow", samples=3, validation=3), tmp_path / "set")
    assert len(set(contents(tmp_path / "set").values())) == 6


def test_a_complete_set_is_not_made_again(tmp_path):
    make.make_set(layout("deepcam"), tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in list_files(tmp_path / "set")}
    assert make.make_set(layout("deepcam"), tmp_path / "set")[1] is False
    assert {path: path.stat().st_mtime_ns for path in list_files(tmp_path / "set")} == before


def test_another_set_of_ours_is_refused(tmp_path):
    make.make_set(layout("deepcam"), tmp_path / "set")
    with pytest.raises(DataError, match=r"holds another set of ours \(other samples, seed\)"):
        make.make_set(layout("deepcam", samples=5, seed=3), tmp_path / "set")


def test_a_set_of_ours_that_lost_a_file_is_refused(tmp_path):
    make.make_set(layout("deepcam"), tmp_path / "set")
    list_files(tmp_path / "set")[1].unlink()
    with pytest.raises(DataError, match="holds this set, but damaged: 5 files, its manifest says 6"):
        make.make_set(layout("deepcam"), tmp_path / "set")


def test_a_set_that_cannot_fit_is_refused_before_it_begins(tmp_path):
    with pytest.raises(DataError, match="GB free, the set needs about"):
        make.make_set(layout("deepcam", preset="reference", samples=10**8), tmp_path / "set")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(("workload", "form"), ALL)
def test_a_full_disk_names_the_path_and_leaves_nothing(tmp_path, workload, form):
    # RLIMIT_FSIZE makes the kernel refuse to write on, as a quota does.
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from pytest_mlhpc.worker.data import make; from pytest_mlhpc.worker.data.layout import Layout\n"
        "from pytest_mlhpc.worker.data.errors import DataError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        f"try: make.make_set({layout(workload, form)!r}, Path(sys.argv[1]))\n"
        "except DataError as error: sys.exit(f'told: {error}')\n"
    )
    root = tmp_path / "out" / "set"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"told: {root.parent}" in done.stderr
    assert "no room to write it" in done.stderr
    assert list(root.parent.iterdir()) == []


def making(root, count):
    code = (
        "import sys; from pathlib import Path\n"
        "from pytest_mlhpc.worker.data import make; from pytest_mlhpc.worker.data.layout import Layout\n"
        f"layout = {layout('cosmoflow', samples=count)!r}\n"
        "made = make.make_set(layout, Path(sys.argv[1]), lambda done, total: print(done, flush=True))[1]\n"
        "print('made' if made else 'found')\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)


@pytest.mark.servers
def test_what_a_killed_maker_left_is_removed_by_the_next(tmp_path):
    root = tmp_path / "out" / "set"
    with making(root, 2000) as process:
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGKILL)
    assert [path.name[:12] for path in root.parent.iterdir()] == [".set.making-"]
    make.make_set(layout("cosmoflow"), root)
    assert [path.name for path in root.parent.iterdir()] == ["set"]


@pytest.mark.servers
def test_of_several_makers_one_makes_and_the_others_find(tmp_path):
    makers = [making(tmp_path / "set", 20) for _ in range(3)]
    words = sorted(maker.communicate()[0].split()[-1] for maker in makers)
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    assert words == ["found", "found", "made"]


@pytest.mark.servers
def test_cosmoflow_has_the_size_and_the_saving_of_the_real_set(tmp_path):
    make.make_set(layout("cosmoflow", preset="reference", samples=6, validation=0), tmp_path / "set")
    sizes = [path.stat().st_size for path in list_files(tmp_path / "set")]
    raw = 128**3 * 4 * 2
    assert np.mean(sizes) == pytest.approx(2.8e6, rel=0.10)  # HPDC'24: mean input 2.8 MB, gzip
    assert 1 - np.mean(sizes) / raw == pytest.approx(0.88, rel=0.10)  # SC'21 draft: compression saves 88 %
    x, y = tfrecord.read_sample(list_files(tmp_path / "set")[0], (128, 128, 128, 4), 4)
    assert x.min() >= 0
    assert np.abs(y).max() <= 1


@pytest.mark.servers
def test_deepcam_has_the_size_and_the_saving_of_the_real_set(tmp_path):
    make.make_set(layout("deepcam", preset="reference", samples=1, validation=0), tmp_path / "set")
    path = next(path for path in list_files(tmp_path / "set") if path.name != deepcam_hdf5.STATS)
    raw = path.read_bytes()
    assert len(raw) / 2**20 == pytest.approx(61, rel=0.10)  # HPDC'24: mean input 61 MB, not compressed
    assert 1 - len(gzip.compress(raw, 6)) / len(raw) == pytest.approx(
        0.23, rel=0.10
    )  # SC'21 draft: saves 23 %


def test_pictures_have_the_size_of_the_real_ones(tmp_path):
    make.make_set(layout("resnet50", preset="reference", samples=16, validation=0), tmp_path / "set")
    sizes = [path.stat().st_size for path in list_files(tmp_path / "set")]
    assert np.mean(sizes) == pytest.approx(124e3, rel=0.10)  # HPDC'24: mean input 124 KB


def test_small_volumes_pack_like_large_ones(tmp_path):
    make.make_set(layout("cosmoflow", samples=16, validation=0), tmp_path / "set")
    sizes = [path.stat().st_size for path in list_files(tmp_path / "set")]
    assert 1 - np.mean(sizes) / (32**3 * 4 * 2) == pytest.approx(0.88, rel=0.10)


def test_a_workload_without_a_format_is_told(tmp_path):
    with pytest.raises(
        DataError,
        match="has no file format to make a synthetic set in, these have: cosmoflow, deepcam, resnet50",
    ):
        layout_of("language_model", {}, samples=1, validation=0, seed=0)


def test_a_format_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(DataError, match="has no format 'zarr', choose one of tfrecord-gzip, tfrecord, hdf5"):
        layout("cosmoflow", "zarr")


def test_a_place_that_may_not_be_written_is_told():
    with pytest.raises(DataError, match="/proc/none: cannot be written"):  # not even by root
        make.make_set(layout("deepcam"), Path("/proc/none/set"))


def test_any_part_of_a_learnable_picture_tells_its_class():
    """A random crop shows a twelfth of it; so does a corner."""
    colours = {
        label: np.mean([learnable.picture(0, index, 53, 71, label) for index in range(16)], axis=(0, 1, 2))
        for label in range(8)
    }
    for index in range(16, 48):
        corner = learnable.picture(0, index, 53, 71, index % 8)[:15, :20].mean(axis=(0, 1))
        nearest = min(colours, key=lambda label: float(np.abs(colours[label] - corner).sum()))
        assert nearest == index % 8
