"""Folders of a set and its manifest, and how errors of files are named."""

import errno
import json
import os
import pickle

import pytest
from file_trees import write_tree
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_mlhpc.node.worker.data import dataset_files
from pytest_mlhpc.node.worker.data.dataset_files import DataError, read_error, write_error
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE


@pytest.fixture
def made(tmp_path):
    root = write_tree(tmp_path / "set", {"train/a": "1234", "train/b": "1234"})
    dataset_files.write_manifest(root, dataset_files.describe(root, {"workload": "w"}))
    return root


def test_a_whole_set_agrees_with_its_manifest(made):
    manifest = dataset_files.read_manifest(made)
    assert (manifest.files, manifest.bytes, manifest.sample, manifest.kind) == (2, 10, "train/a", "synthetic")
    assert dataset_files.check_manifest(made, manifest) == []


def test_what_is_missing_or_changed_is_named(made):
    manifest = dataset_files.read_manifest(made)
    (made / "train" / "a").write_bytes(b"1234x")
    (made / "train" / "b").unlink()
    assert dataset_files.check_manifest(made, manifest) == [
        "1 files, its manifest says 2",
        "5 bytes, its manifest says 10",
        "the sample train/a has another SHA-256 than its manifest says",
    ]


def test_a_newer_manifest_is_refused_by_name(made):
    path = made / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(DataError, match="has schema 99, this release reads up to 1"):
        dataset_files.read_manifest(made)


@given(raw=st.binary(max_size=300))
@example(b"{")
@example(b"[]")
@example(b"{}")
@example(b'{"schema": 1}')
@example(b'{"schema": "1"}')
@example(b"[" * 100_000)
def test_a_manifest_of_odd_bytes_is_refused_by_name(tmp_path, raw):
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError, match=f"^{tmp_path}/manifest.json"):
        dataset_files.read_manifest(tmp_path)


def test_hidden_files_broken_links_and_pipes_are_no_samples_and_circles_of_links_end(tmp_path):
    write_tree(tmp_path, {"a/x": "", ".hidden": ""})
    os.mkfifo(tmp_path / "pipe")
    for link, target in (("nowhere", "gone"), ("a/up", ""), ("b", "a")):
        (tmp_path / link).symlink_to(tmp_path / target)
    assert dataset_files.list_files(tmp_path) == [tmp_path / "a" / "x"]


@pytest.mark.parametrize(("name", "text"), [("gone", "is not there"), ("file", "is no folder")])
def test_a_path_that_is_no_folder_is_refused(tmp_path, name, text):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=text):
        dataset_files.list_files(tmp_path / name)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with pytest.raises(DataError, match="cannot be written"):
        dataset_files.write_file(tmp_path / "gone" / "a", b"new")
    dataset_files.write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]  # noqa: PTH208 - hidden files too, names only


@pytest.mark.parametrize("there", [False, True], ids=["a new folder", "an empty folder"])
def test_a_set_appears_when_its_building_ends(tmp_path, there):
    root = tmp_path / "deep" / "set"
    if there:
        root.mkdir(parents=True)
    with dataset_files.building(root) as folder:
        (folder / "a").touch()
        assert not (root / "a").exists()
    assert (root / "a").exists()
    assert [path.name for path in root.parent.iterdir()] == ["set"]


def test_a_building_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), dataset_files.building(tmp_path / "new" / "set") as folder:  # noqa: PT012
        (folder / "a").touch()
        raise RuntimeError
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    root = write_tree(tmp_path / "thesis", {"chapter1": "precious"})
    with pytest.raises(DataError, match="is not empty and holds no manifest"), dataset_files.building(root):
        pass
    assert (root / "chapter1").read_text() == "precious\n"


NO_ROOM = [write_error("/data/a", OSError(full, "no space")) for full in (errno.ENOSPC, errno.EDQUOT)]
OTHER = read_error("/data/a", OSError(errno.EIO, "bad sector"), "a sample")


@pytest.mark.parametrize(
    ("error", "text", "outcomes"),
    [
        *((error, "no room to write it (no space)", INFRASTRUCTURE) for error in NO_ROOM),
        (OTHER, "cannot be read (bad sector), expected a sample", FAILURES),
    ],
)
def test_no_room_is_the_machines_fault_and_other_trouble_the_runs_own(error, text, outcomes):
    assert str(error).startswith(f"/data/a: {text}")
    assert error.outcome in outcomes
    assert (error.outcome == "disk_full") == (error in NO_ROOM)
    assert isinstance(error, WorkerFailure)  # a rank reports it by name, without a traceback


def test_an_error_travels_between_processes():
    again = pickle.loads(pickle.dumps(DataError("/a", "bad", "disk_full")))  # noqa: S301 - our own bytes
    assert (again.path, again.message, again.outcome, str(again)) == ("/a", "bad", "disk_full", "/a: bad")
    # torch raises it again with a text alone
    assert str(DataError("Caught DataError in DataLoader worker process 0.")).startswith("Caught DataError")
