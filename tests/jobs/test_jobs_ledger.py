from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_file import read_ledger
from pytest_mlhpc.jobs.submitted import Submitted


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_session_that_submits_nothing_writes_nothing(tmp_path):
    Ledger(tmp_path / "state", "s1").close()
    assert not (tmp_path / "state").exists()


def test_the_id_is_on_disk_before_anything_is_submitted(tmp_path):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("job1", "sys:part", "slurm"))
    opened, submitted = lines(tmp_path / "ledger" / "s1.jsonl")
    assert opened["owner"]["pid"] == os.getpid()
    assert (submitted["event"], submitted["id"], submitted["schema"]) == ("submitted", "job1", 3)
    ledger.close()


def test_a_ledger_with_nothing_left_is_put_aside_and_another_stays(tmp_path):
    done, left = Ledger(tmp_path, "done"), Ledger(tmp_path, "left")
    for ledger in (done, left):
        ledger.submitted(Submitted("job", "sys:part"))
    done.ended("job")
    done.ended("job")  # told twice, counted once
    done.close()
    left.close()
    assert (tmp_path / "ledger" / "closed" / "done.jsonl").exists()
    assert (tmp_path / "ledger" / "left.jsonl").exists()


def test_a_ledger_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "ledger").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match=r"ledger/s1\.jsonl"):
        Ledger(tmp_path, "s1").submitted(Submitted("job", "sys:part"))


def full_disk(monkeypatch, after: int) -> None:
    """From now on, *after* more bytes can be written."""
    left, write = after, os.write

    def short(file: int, content: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[:left])
        left -= written
        return written

    monkeypatch.setattr(os, "write", short)


def test_a_line_that_is_written_in_part_is_an_error_and_its_id_counts_as_ended(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("job", "sys:part"))
    full_disk(monkeypatch, after=5)
    with pytest.raises(StoreError, match=r"ledger/s1\.jsonl: No space left on device"):
        ledger.ended("job")
    ledger.close()
    assert (tmp_path / "ledger" / "closed" / "s1.jsonl").exists()


def test_a_file_whose_first_line_cannot_be_written_is_made_again_later(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    with monkeypatch.context() as patch:
        full_disk(patch, after=5)
        with pytest.raises(StoreError, match="No space left"):
            ledger.submitted(Submitted("job1", "sys:part"))
    ledger.submitted(Submitted("job2", "sys:part"))
    assert [line["event"] for line in lines(tmp_path / "ledger" / "s1.jsonl")] == ["opened", "submitted"]
    ledger.close()


def test_a_first_line_that_was_cut_short_and_could_not_be_removed_spoils_nothing(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    with monkeypatch.context() as patch:
        full_disk(patch, after=5)
        patch.setattr(os, "unlink", lambda _path: Path("/dev/null/x").stat())  # ENOTDIR
        with pytest.raises(StoreError, match="No space left"):
            ledger.submitted(Submitted("a", "sys:part"))
    ledger.submitted(Submitted("b", "sys:part"))
    assert list(read_ledger(ledger.path).open) == ["b"]
    ledger.ended("b")
    ledger.close()


def test_a_ledger_that_cannot_be_put_aside_is_named(tmp_path):
    ledger = Ledger(tmp_path, "mine")
    ledger.submitted(Submitted("job", "sys:part"))
    (tmp_path / "ledger" / "closed").write_text("a file where a folder is needed")
    ledger.ended("job")
    with pytest.raises(StoreError, match=r"cannot move the ledger .*/ledger/mine\.jsonl"):
        ledger.close()


def test_users_of_one_group_share_the_folders_and_not_the_files(tmp_path):
    tmp_path.chmod(0o2775)
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("job", "sys:part"))
    ledger.ended("job")
    ledger.close()
    closed = tmp_path / "ledger" / "closed"
    assert [path.stat().st_mode & 0o7777 for path in (closed.parent, closed)] == [0o2775, 0o2775]
    assert (closed / "s1.jsonl").stat().st_mode & 0o777 == 0o600


def synced(monkeypatch, work) -> int:
    """Return how many files and folders *work* has synced."""
    count = 0
    fsync = os.fsync

    def counting(file):
        nonlocal count
        count += 1
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counting)
        work()
    return count


def test_lines_of_jobs_that_outlive_this_machine_are_synced_and_their_files_name_too(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    assert synced(monkeypatch, lambda: ledger.submitted(Submitted("a", "local:cpu"))) == 0
    assert synced(monkeypatch, lambda: ledger.ended("a")) == 0
    assert synced(monkeypatch, lambda: ledger.submitted(Submitted("b", "sys:part", "slurm"))) == 2
    assert synced(monkeypatch, lambda: ledger.accepted("b", "12")) == 1
    assert synced(monkeypatch, lambda: ledger.ended("b")) == 1
    ledger.close()


def test_the_schedulers_own_id_is_known_from_a_second_line(tmp_path):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    ledger.accepted("a", "4711")
    ledger.accepted("never submitted", "1")
    assert read_ledger(ledger.path).open["a"].native_id == "4711"
    ledger.ended("a")
    ledger.close()


def test_a_beat_touches_the_file_and_costs_nothing_in_between(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    assert ledger.beat()  # nothing submitted: there is no file to touch
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    os.utime(ledger.path, (1, 1))
    ledger._beaten = 0.0
    assert ledger.beat()
    assert ledger.path.stat().st_mtime > 1
    monkeypatch.setattr(os, "utime", pytest.fail)
    assert ledger.beat()
    ledger.ended("a")
    ledger.close()


def test_a_beat_that_the_disk_refuses_is_tried_again(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    ledger._beaten = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", lambda _path: Path("/dev/null/x").stat())  # ENOTDIR
        assert ledger.beat()
    ledger.ended("a")
    ledger.close()


def test_detaching_writes_the_lease_last_and_nothing_comes_after_it(tmp_path):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    ledger.detach(4_000_000_000 * 10**9)
    assert lines(ledger.path)[-2:] == [
        {"schema": 3, "event": "lease", "until_ns": 4_000_000_000 * 10**9},
        {"schema": 3, "event": "left"},
    ]
    with pytest.raises(StoreError, match="it was closed or taken over"):
        ledger.submitted(Submitted("b", "sys:part", "slurm"))
    ledger.path.unlink()


def test_detaching_with_nothing_open_puts_the_ledger_aside(tmp_path):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    ledger.ended("a")
    ledger.detach(1)
    assert not ledger.path.exists()


def test_a_line_after_a_torn_one_is_whole(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "s1")
    ledger.submitted(Submitted("a", "sys:part", "slurm"))
    with monkeypatch.context() as patch:
        full_disk(patch, after=30)
        with pytest.raises(StoreError, match="No space left"):
            ledger.submitted(Submitted("b", "sys:part", "slurm"))
    ledger.submitted(Submitted("c", "sys:part", "slurm"))
    file = read_ledger(ledger.path)
    assert sorted(file.open) == ["a", "c"]
    (damage,) = file.damage
    assert f"{ledger.path}:3: damaged line skipped" in damage
    for name in "ac":
        ledger.ended(name)
    ledger.close()


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "x" * 101, "a b"])
def test_a_name_that_cannot_be_a_files_is_refused(tmp_path, name):
    with pytest.raises(StoreError, match="cannot be the name of a ledger file"):
        Ledger(tmp_path, name)
