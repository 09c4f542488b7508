import gzip
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from data_sets import FORMATS, digests, layout

from pytest_mlhpc.node.worker.data import formats, make, tfrecord
from pytest_mlhpc.node.worker.data.dataset_files import DataError, list_files


@pytest.mark.parametrize(("workload", "form"), FORMATS)
def test_equal_seeds_make_equal_files_and_other_seeds_others(made_set, tmp_path, workload, form):
    make.make_set(layout(workload, form), tmp_path / "again")
    first, again, other = map(
        digests, (made_set(workload, form), tmp_path / "again", made_set(workload, form, seed=1))
    )
    assert first == again
    assert {name for name, _ in set(first.items()) & set(other.items())} <= {"stats.h5"}


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


def test_training_and_validation_share_no_sample(made_set):
    assert len(set(digests(made_set("cosmoflow", samples=3, validation=3)).values())) == 6


def test_a_complete_set_is_not_made_again(made_set):
    root = made_set("deepcam")
    before = {path: path.stat().st_mtime_ns for path in list_files(root)}
    assert make.make_set(layout("deepcam"), root)[1] is False
    assert {path: path.stat().st_mtime_ns for path in list_files(root)} == before


@pytest.mark.parametrize(
    ("asked", "place", "text"),
    [
        (layout("deepcam", samples=5, seed=3), "set", r"holds another set of ours \(other samples, seed\)"),
        (layout("deepcam"), "damaged", "holds this set, but damaged: 5 files, its manifest says 6"),
        (layout("deepcam", preset="reference", samples=10**8), "new", "GB free, the set needs about"),
        (layout("deepcam"), "/proc/none/set", "/proc/none: cannot be written"),  # not even by root
    ],
    ids=["another set is there", "a set that lost a file is there", "it cannot fit", "it may not be written"],
)
def test_no_set_is_made_where(made_set, tmp_path, asked, place, text):
    for name in ("set", "damaged"):
        shutil.copytree(made_set("deepcam"), tmp_path / name)
    list_files(tmp_path / "damaged")[1].unlink()
    with pytest.raises(DataError, match=text):
        make.make_set(asked, tmp_path / place)
    assert not (tmp_path / "new").exists()


#: Makes the set that the first argument describes in the folder that is the second.
MAKER = (
    "import resource, sys; from pathlib import Path\n"
    "from pytest_mlhpc.node.worker.data import make; from pytest_mlhpc.node.worker.data.dataset_files import DataError\n"
    "from pytest_mlhpc.node.worker.data.dataset_files import SetLayout\n"
)
#: RLIMIT_FSIZE makes the kernel refuse to write on, as a quota does.
FULL_DISK = MAKER + (
    "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    "for number, layout in enumerate(eval(sys.argv[1])):\n"
    "    try: make.make_set(layout, Path(sys.argv[2], f'{number}', 'set'))\n"
    "    except DataError as error: print(error)\n"
)
TELLING = MAKER + (
    "made = make.make_set(eval(sys.argv[1]), Path(sys.argv[2]), lambda done, total: print(done, flush=True))[1]\n"
    "print('made' if made else 'found')\n"
)


def start_maker(code, asked, root):
    command = [sys.executable, "-c", code, repr(asked), str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_full_disk_names_the_path_and_leaves_nothing(tmp_path):
    with start_maker(FULL_DISK, [layout(*form) for form in FORMATS], tmp_path) as process:
        failures = process.stdout.read().splitlines()
    folders = [tmp_path / f"{number}" for number in range(len(FORMATS))]
    for failure, folder in zip(failures, folders, strict=True):
        assert re.match(f"{folder}.*no room to write it", failure)
        assert list(folder.iterdir()) == []


def test_what_a_killed_maker_left_is_removed_by_the_next(tmp_path):
    root = tmp_path / "out" / "set"
    with start_maker(TELLING, layout("cosmoflow", samples=2000), root) as process:
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGKILL)
    assert [path.name[:12] for path in root.parent.iterdir()] == [".set.making-"]
    make.make_set(layout("cosmoflow"), root)
    assert [path.name for path in root.parent.iterdir()] == ["set"]


def test_of_several_makers_one_makes_and_the_others_find(tmp_path):
    makers = [start_maker(TELLING, layout("cosmoflow", samples=20), tmp_path / "set") for _ in range(3)]
    assert sorted(maker.communicate()[0].split()[-1] for maker in makers) == ["found", "found", "made"]
    assert [maker.returncode for maker in makers] == [0, 0, 0]


def sizes_of(root):
    return [path.stat().st_size for path in list_files(root) if path.name != formats.STATS]


@pytest.mark.servers
def test_cosmoflow_has_the_size_and_the_saving_of_the_real_set(made_set):
    root = made_set("cosmoflow", preset="reference", samples=1, validation=0)
    size = np.mean(sizes_of(root))
    assert size == pytest.approx(2.8e6, rel=0.10)  # HPDC'24: mean input 2.8 MB, gzip
    assert 1 - size / (128**3 * 4 * 2) == pytest.approx(0.88, rel=0.10)  # SC'21 draft: compression saves 88 %
    x, y = tfrecord.read_sample(list_files(root)[0], (128, 128, 128, 4), 4)
    assert x.min() >= 0
    assert np.abs(y).max() <= 1


@pytest.mark.servers
def test_deepcam_has_the_size_and_the_saving_of_the_real_set(made_set):
    root = made_set("deepcam", preset="reference", samples=1, validation=0)
    (size,) = sizes_of(root)
    assert size / 2**20 == pytest.approx(61, rel=0.10)  # HPDC'24: mean input 61 MB, not compressed
    (raw,) = (path.read_bytes() for path in list_files(root) if path.name != formats.STATS)
    some = b"".join(raw[start : start + 2**19] for start in range(0, size, 2**22))
    # SC'21 draft: saves 23 %
    assert 1 - len(gzip.compress(some, 6)) / len(some) == pytest.approx(0.23, rel=0.10)


def test_pictures_have_the_size_of_the_real_ones(made_set):
    sizes = sizes_of(made_set("resnet50", preset="reference", samples=16, validation=0))
    assert np.mean(sizes) == pytest.approx(124e3, rel=0.10)  # HPDC'24: mean input 124 KB


def test_small_volumes_pack_like_large_ones(made_set):
    sizes = sizes_of(made_set("cosmoflow", samples=12, validation=0))
    assert 1 - np.mean(sizes) / (32**3 * 4 * 2) == pytest.approx(0.88, rel=0.10)


@pytest.mark.parametrize(
    ("workload", "form", "text"),
    [
        ("language_model", "", "has no file format to make a synthetic set in, these have: cosmoflow, deepcam, resnet50"),
        ("cosmoflow", "zarr", "has no format 'zarr', choose one of tfrecord-gzip, tfrecord, hdf5"),
    ],
)  # fmt: skip
def test_a_format_that_does_not_exist_is_refused(workload, form, text):
    with pytest.raises(DataError, match=text):
        layout(workload, form)


def test_any_part_of_a_learnable_picture_shows_its_class():
    """A random crop shows a twelfth of it; so does a corner."""
    colours = {
        label: np.mean(
            [make.make_learnable_picture(0, index, 53, 71, label) for index in range(16)], axis=(0, 1, 2)
        )
        for label in range(8)
    }
    for index in range(16, 48):
        corner = make.make_learnable_picture(0, index, 53, 71, index % 8)[:15, :20].mean(axis=(0, 1))
        nearest = min(colours, key=lambda label: float(np.abs(colours[label] - corner).sum()))
        assert nearest == index % 8
