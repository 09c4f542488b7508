"""What one session writes into its ledger, when, and what it does where it cannot."""

import errno
import json
import os
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import entry
from odd_values import changed

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_files import read_ledger
from pytest_mlhpc.jobs.resume import open_entries


@pytest.fixture
def ledger(tmp_path):
    """Return the ledger of this session; what a test leaves open in it is removed in the end."""
    made = Ledger(tmp_path, "s1")
    yield made
    made.close()
    if (tmp_path / "ledger").is_dir():
        made.path.unlink(missing_ok=True)


def lines(ledger):
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


def closed(tmp_path):
    return tmp_path / "ledger" / "closed" / "s1.jsonl"


@contextmanager
def full_disk(monkeypatch, after):
    """Let *after* more bytes be written; the next write fails with the ledger's name."""
    left, write = after, os.write

    def short(file, content):
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= (written := write(file, content[:left]))
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(StoreError, match=r"ledger/s1\.jsonl: No space left on device"):
            yield patch


REFUSE = Mock(side_effect=NotADirectoryError(errno.ENOTDIR, "Not a directory"))


def test_the_id_is_on_disk_before_anything_is_submitted(ledger):
    ledger.submitted(entry("job"))
    opened, submitted = lines(ledger)
    assert opened["owner"]["pid"] == os.getpid()
    assert (submitted["event"], submitted["id"], submitted["schema"]) == ("submitted", "job", 3)


@pytest.mark.parametrize("ends", [0, 1, 2])  # told twice, counted once
def test_a_ledger_with_nothing_left_is_put_aside_and_another_stays(tmp_path, ledger, ends):
    ledger.submitted(entry("job"))
    for _ in range(ends):
        ledger.ended("job")
    ledger.close()
    assert closed(tmp_path).exists() == (not ledger.path.exists()) == bool(ends)


def test_a_ledger_that_cannot_be_written_is_named(tmp_path, ledger):
    (tmp_path / "ledger").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match=r"ledger/s1\.jsonl"):
        ledger.submitted(entry("job"))


def test_a_line_that_is_written_in_part_is_an_error_and_its_id_counts_as_ended(tmp_path, ledger, monkeypatch):
    ledger.submitted(entry("job"))
    with full_disk(monkeypatch, after=5):
        ledger.ended("job")
    ledger.close()
    assert closed(tmp_path).exists()


def test_a_file_whose_first_line_cannot_be_written_is_made_again_later(ledger, monkeypatch):
    with full_disk(monkeypatch, after=5):
        ledger.submitted(entry("a"))
    ledger.submitted(entry("b"))
    assert [line["event"] for line in lines(ledger)] == ["opened", "submitted"]


def test_a_first_line_that_was_cut_short_and_could_not_be_removed_spoils_nothing(ledger, monkeypatch):
    with full_disk(monkeypatch, after=5) as patch:
        patch.setattr(os, "unlink", REFUSE)
        ledger.submitted(entry("a"))
    ledger.submitted(entry("b"))
    assert list(read_ledger(ledger.path).open) == ["b"]


def test_a_line_after_a_torn_one_is_whole(ledger, monkeypatch):
    ledger.submitted(entry("a"))
    with full_disk(monkeypatch, after=30):
        ledger.submitted(entry("b"))
    ledger.submitted(entry("c"))
    file = read_ledger(ledger.path)
    assert sorted(file.open) == ["a", "c"]
    (damage,) = file.damage
    assert f"{ledger.path}:3: damaged line skipped" in damage


def test_a_ledger_that_cannot_be_put_aside_is_named(tmp_path, ledger):
    ledger.submitted(entry("job"))
    (tmp_path / "ledger" / "closed").write_text("a file where a folder is needed")
    ledger.ended("job")
    with pytest.raises(StoreError, match=r"cannot move the ledger .*/ledger/s1\.jsonl"):
        ledger.close()


def test_users_of_one_group_share_the_folders_and_not_the_files(tmp_path, ledger):
    tmp_path.chmod(0o2775)
    ledger.submitted(entry("job"))
    ledger.ended("job")
    ledger.close()
    folder, file = closed(tmp_path).parent, closed(tmp_path)
    modes = [path.stat().st_mode & 0o7777 for path in (folder.parent, folder, file)]
    assert modes == [0o2775, 0o2775, 0o600]


def test_a_ledger_that_others_could_have_written_is_left_alone(tmp_path, ledger):
    ledger.submitted(entry("job"))
    ledger.path.chmod(0o660)
    found = open_entries(tmp_path)
    assert found.entries == ()
    assert (
        f"{ledger.path}: cannot be read: group {os.getgid()} may change it (mode 0660)" in found.left_alone[0]
    )


def test_lines_of_jobs_that_outlive_this_machine_are_synced_and_their_files_name_too(ledger, monkeypatch):
    synced = Mock(side_effect=os.fsync)
    monkeypatch.setattr(os, "fsync", synced)
    for write, arguments, count in (
        (ledger.submitted, [entry("a", scheduler="local")], 0),
        (ledger.ended, ["a"], 0),
        (ledger.submitted, [entry("b")], 2),
        (ledger.accepted, ["b", "12"], 1),
        (ledger.ended, ["b"], 1),
    ):
        synced.reset_mock()
        write(*arguments)
        assert synced.call_count == count, arguments


def test_the_schedulers_own_id_is_known_from_a_second_line(ledger):
    ledger.submitted(entry("a"))
    ledger.accepted("a", "4711")
    ledger.accepted("never submitted", "1")
    assert read_ledger(ledger.path).open["a"].native_id == "4711"


def test_a_beat_touches_the_file_and_costs_nothing_in_between(ledger, monkeypatch):
    assert ledger.beat()  # nothing submitted: there is no file to touch
    ledger.submitted(entry("a"))
    os.utime(ledger.path, (1, 1))
    ledger._beaten = 0.0
    assert ledger.beat()
    assert ledger.path.stat().st_mtime > 1
    monkeypatch.setattr(os, "utime", pytest.fail)
    assert ledger.beat()


def test_a_beat_that_the_disk_refuses_is_tried_again(ledger, monkeypatch):
    ledger.submitted(entry("a"))
    ledger._beaten = 0.0
    monkeypatch.setattr(os, "utime", REFUSE)
    assert ledger.beat()


def test_detaching_writes_the_lease_last_and_nothing_comes_after_it(ledger):
    ledger.submitted(entry("a"))
    ledger.detach(4 * 10**18)
    lease, left = {"event": "lease", "until_ns": 4 * 10**18}, {"event": "left"}
    assert lines(ledger)[-2:] == [{"schema": 3, **lease}, {"schema": 3, **left}]
    with pytest.raises(StoreError, match="it was closed or taken over"):
        ledger.submitted(entry("b"))


def test_detaching_with_nothing_open_puts_the_ledger_aside(ledger):
    ledger.submitted(entry("a"))
    ledger.ended("a")
    ledger.detach(1)
    assert not ledger.path.exists()


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "x" * 101, "a b"])
def test_a_name_that_cannot_be_a_files_is_refused(tmp_path, name):
    with pytest.raises(StoreError, match="cannot be the name of a ledger file"):
        Ledger(tmp_path, name)


@given(st.data())
def test_any_value_in_any_line_is_read_or_refused_in_words(ledger, data):
    path = ledger.path
    if not path.exists():
        ledger.submitted(entry("job"))
        ledger.accepted("job", "4711")
        ledger.lease(2**62)
        path.with_suffix(".whole").write_bytes(path.read_bytes())
    whole = [json.loads(line) for line in path.with_suffix(".whole").read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in data.draw(changed(whole))))
    try:
        found = read_ledger(path)
    except StoreError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(found.lease_of(one) is None or isinstance(found.lease_of(one), int) for one in found.open)
