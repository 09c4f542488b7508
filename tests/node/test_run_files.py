"""Files that a run finds in its folder, and those that its test reads."""

import io
import os
import tarfile
from dataclasses import replace

import pytest
from pods import run_plan

from pytest_mlhpc.node import run_files
from pytest_mlhpc.node.protocol.plan import Plan


@pytest.fixture
def source(tmp_path):
    """A script, a folder with a file and things that are none, and a link to a file."""
    folder = tmp_path / "source"
    (folder / "input" / "deep").mkdir(parents=True)
    (folder / "input" / "__pycache__").mkdir()
    (folder / "input" / "__pycache__" / "a.pyc").write_text("x")
    (folder / "input" / "deep" / "text").write_text("text")
    os.mkfifo(folder / "input" / "pipe")
    (folder / "script").write_text("#!/bin/sh")
    (folder / "script").chmod(0o755)
    (folder / "link").symlink_to("script")
    return folder


@pytest.fixture
def files(source):
    return {name: str(source / name) for name in ("input", "script", "link")}


def regular(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_each_run_has_a_folder_of_its_own_with_links_to_one_copy(tmp_path, files):
    runs = (run_plan("a", files=files), run_plan("b", files=dict(reversed(files.items()))))
    plan = Plan("x", "", str(tmp_path / "plan"), 1, 60.0, runs)
    run_files.stage(plan)
    (copy,) = (tmp_path / "plan").iterdir()
    assert regular(copy) == ["input/deep/text", "link", "script"]
    assert not (copy / "link").is_symlink()
    for run in runs:
        folder = tmp_path / "plan" / run.run_id
        folder.mkdir()
        run_files.link_files(run, tmp_path / "plan", folder)
        run_files.link_files(run, tmp_path / "plan", folder)  # the run is started once more
        assert regular(folder) == ["input/deep/text", "link", "script"]
        assert os.access(folder / "script", os.X_OK)
        (folder / "input" / "deep" / "made").write_text("by the run")
    assert not (copy / "input" / "deep" / "made").exists()


def test_pods_get_the_same_files_as_an_archive(tmp_path, files):
    archive = tmp_path / "files.tar"
    archive.write_bytes(run_files.staged_archive(files))
    run_files.unpack(archive, tmp_path / "copy")
    assert regular(tmp_path / "copy") == ["input/deep/text", "link", "script"]
    assert os.access(tmp_path / "copy" / "script", os.X_OK)


def test_artifacts_are_files_of_the_folder_that_a_name_or_glob_says(tmp_path):
    (tmp_path / "run" / "out").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    for name in ("m.json", "out/a.txt", "out/b.bin"):
        (tmp_path / "run" / name).write_text(name)
    (tmp_path / "run" / "leads.txt").symlink_to(tmp_path / "secret")
    found = run_files.artifacts_of(tmp_path / "run", ["m.json", "*.txt", "missing"])
    assert sorted(found) == ["m.json", "out/a.txt"]


def test_artifacts_beyond_what_a_pod_sends_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "ARCHIVE_BYTES", 3)
    (tmp_path / "large").write_text("1234")
    with pytest.raises(
        ValueError, match="the artifacts have 4 bytes, a pod sends 3; write large files to a volume"
    ):
        run_files.artifact_archive(tmp_path, ["large"])


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_an_archive_writes_nothing_outside_of_its_folder(tmp_path, name):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    (tmp_path / "a.tar").write_bytes(content.getvalue())
    run_files.unpack(tmp_path / "a.tar", tmp_path / "into")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.tar"]


def test_a_run_without_files_has_none(tmp_path):
    plan = replace(Plan("x", "", str(tmp_path), 1, 60.0, (run_plan(),)))
    run_files.stage(plan)
    assert list(tmp_path.iterdir()) == []
