import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import files
from pytest_mlhpc.worker.data.errors import DataError


@pytest.fixture
def made(tmp_path):
    root = tmp_path / "set"
    (root / "train").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "train" / name).write_bytes(b"12345")
    files.write_manifest(root, files.describe(root, {"workload": "w"}))
    return root


def test_a_whole_set_agrees_with_its_manifest(made):
    manifest = files.read_manifest(made)
    assert (manifest.files, manifest.bytes, manifest.sample, manifest.kind) == (2, 10, "train/a", "synthetic")
    assert files.check_manifest(made, manifest) == []


def test_what_is_missing_or_changed_is_named(made):
    manifest = files.read_manifest(made)
    (made / "train" / "a").write_bytes(b"1234x")
    (made / "train" / "b").unlink()
    assert files.check_manifest(made, manifest) == [
        "1 files, its manifest says 2",
        "5 bytes, its manifest says 10",
        "the sample train/a has another SHA-256 than its manifest says",
    ]


def test_a_newer_manifest_is_refused_by_name(made):
    path = made / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(DataError, match="has schema 99, this release reads up to 1"):
        files.read_manifest(made)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": "1"}', "[" * 100_000])
def test_a_damaged_manifest_is_named(made, text):
    (made / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        files.read_manifest(made)
    assert str(caught.value).startswith(str(made / "manifest.json"))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=300))
def test_a_manifest_of_any_bytes_is_read_or_refused(tmp_path, raw):
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError):
        files.read_manifest(tmp_path)


def test_hidden_files_broken_links_and_pipes_are_no_samples(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    assert files.list_files(tmp_path) == [tmp_path / "a"]


def test_linked_folders_are_entered_once_and_circles_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert files.list_files(tmp_path) == [tmp_path / "a" / "x"]


@pytest.mark.parametrize(("name", "text"), [("gone", "is not there"), ("file", "is no folder")])
def test_no_folder_is_told(tmp_path, name, text):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=text):
        files.list_files(tmp_path / name)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with pytest.raises(DataError, match="cannot be written"):
        files.replace_file(tmp_path / "gone" / "a", b"new")
    files.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]  # noqa: PTH208 - hidden files too, names only


def test_a_set_appears_when_its_building_ends(tmp_path):
    root = tmp_path / "deep" / "set"
    with files.building(root) as folder:
        (folder / "a").touch()
        assert not root.exists()
    assert (root / "a").exists()
    assert [path.name for path in root.parent.iterdir()] == ["set"]


def test_a_building_that_fails_leaves_nothing(tmp_path):
    def fail():
        with files.building(tmp_path / "set") as folder:
            (folder / "a").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == [tmp_path / "mlhpc-state"][: (tmp_path / "mlhpc-state").exists()]


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    root = tmp_path / "thesis"
    root.mkdir()
    (root / "chapter1").write_text("precious")
    with pytest.raises(DataError, match="is not empty and holds no manifest"), files.building(root):
        pass
    assert (root / "chapter1").read_text() == "precious"


def test_an_empty_folder_is_taken(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    with files.building(root) as folder:
        (folder / "a").touch()
    assert (root / "a").exists()
