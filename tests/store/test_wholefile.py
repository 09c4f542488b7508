"""Files that are there whole or not at all."""

import os
import re
import time
from pathlib import Path

import pytest
from full_disk import Limited

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.store.locations import LEFT_AFTER_S, replace_file


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("old")
    words = re.escape(f"{path}: cannot be written: File too large")
    with Limited().full(1000), pytest.raises(StoreError, match=words):
        replace_file(path, "x" * 5000)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_in_pieces_takes_its_place_once_it_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    sizes = []

    def ready(descriptor: int) -> None:
        sizes.append((os.fstat(descriptor).st_size, path.read_text()))

    replace_file(path, iter([b"one\n", b"two\n"]), ready=ready)
    assert (path.read_text(), sizes) == ("one\ntwo\n", [(8, "old")])


def test_a_file_that_is_refused_when_it_is_ready_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")

    def refuse(_descriptor: int) -> None:
        raise StoreError("it has changed")

    with pytest.raises(StoreError, match="it has changed"):
        replace_file(path, "new", ready=refuse)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    replace_file(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new"


def test_what_a_killed_writer_left_goes_with_the_next_writing(tmp_path: Path) -> None:
    left, young = tmp_path / ".a.yaml.k1ll3d_x.part", tmp_path / ".a.yaml.wr1t1ng_.part"
    others = [
        tmp_path / name
        for name in (".b.yaml.k1ll3d_x.part", ".a.yaml.settings", "a.yaml.part", "xa.yaml.x.part")
    ]
    for file in (left, *others):
        file.write_text("x")
        os.utime(file, times=(0, time.time() - LEFT_AFTER_S - 60))
    young.write_text("x")
    replace_file(tmp_path / "a.yaml", "new")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.yaml", young, *others])
