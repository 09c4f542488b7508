"""What one session writes into its ledger, when, and what it does where it cannot."""

import errno
import json
import os
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import claim, entry, file_of, ids, later, rewrite_owner, states
from odd_values import changed

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_files import open_entries, read_allocation, read_session


@pytest.fixture
def ledger(tmp_path):
    """Return the ledger of this session; what a test leaves open in it is removed in the end."""
    yield Ledger(tmp_path, "s1")
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        path.unlink()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "ledger").iterdir())


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
        with pytest.raises(StoreError, match=r"ledger/.*s1\.jsonl: No space left on device"):
            yield patch


REFUSE = Mock(side_effect=NotADirectoryError(errno.ENOTDIR, "Not a directory"))


def test_the_id_is_on_disk_before_anything_is_submitted(tmp_path, ledger):
    ledger.submitted(entry("job"))
    (opened,), (submitted,) = lines(ledger.path), lines(file_of(tmp_path, "job"))
    assert opened["owner"]["pid"] == os.getpid()
    assert (submitted["event"], submitted["id"], submitted["by"], submitted["schema"]) == (
        "submitted",
        "job",
        "s1",
        4,
    )


@pytest.mark.parametrize("ends", [0, 1, 2])  # told twice, counted once
def test_a_session_whose_allocations_have_ended_leaves_no_file_and_another_leaves_its_own(
    tmp_path, ledger, ends
):
    ledger.submitted(entry("job"))
    for _ in range(ends):
        ledger.ended("job")
    ledger.close()
    assert files(tmp_path) == ([] if ends else ["job@s1.jsonl", "s1.jsonl"])


def test_a_ledger_that_cannot_be_written_is_named(tmp_path, ledger):
    (tmp_path / "ledger").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match=r"ledger/s1\.jsonl"):
        ledger.submitted(entry("job"))
    (tmp_path / "ledger").unlink()


def test_a_file_that_cannot_be_removed_is_an_error_and_its_id_counts_as_ended(tmp_path, ledger, monkeypatch):
    ledger.submitted(entry("job"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", REFUSE)
        with pytest.raises(StoreError, match=r"cannot remove .*job@s1\.jsonl from the ledger: Not a dir"):
            ledger.ended("job")
    ledger.ended("job")
    ledger.close()
    assert states(tmp_path) == {"job": "expired"}  # the next session ends it once more, and removes the file


@pytest.mark.parametrize("after", [5, 400], ids=["the session's", "the allocation's"])
def test_a_file_whose_first_line_cannot_be_written_is_made_again_later(tmp_path, ledger, monkeypatch, after):
    with full_disk(monkeypatch, after=after):
        ledger.submitted(entry("a"))
    assert files(tmp_path) == ([] if after == 5 else ["s1.jsonl"])
    ledger.submitted(entry("a"))
    assert [line["event"] for line in lines(ledger.path)] == ["opened"]
    assert [line["event"] for line in lines(file_of(tmp_path, "a"))] == ["submitted"]


def test_a_first_line_that_was_cut_short_and_could_not_be_removed_spoils_nothing(
    tmp_path, ledger, monkeypatch
):
    with full_disk(monkeypatch, after=5) as patch:
        patch.setattr(os, "unlink", REFUSE)
        patch.setattr(os, "ftruncate", REFUSE)
        ledger.submitted(entry("a"))
    ledger.submitted(entry("b"))
    assert read_session(ledger.path).owner.pid == os.getpid()
    assert states(tmp_path) == {"b": "held"}


def test_a_line_after_a_torn_one_is_whole(tmp_path, ledger, monkeypatch):
    ledger.submitted(entry("a"))
    with full_disk(monkeypatch, after=30) as patch:
        patch.setattr(os, "ftruncate", REFUSE)
        ledger.accepted("a", "4711")
    ledger.accepted("a", "4712")
    path = file_of(tmp_path, "a")
    file = read_allocation(path)
    assert file.entry.native_id == "4712"
    (damage,) = file.damage
    assert f"{path}:2: damaged line skipped" in damage


def test_a_ledger_that_cannot_be_removed_is_named(ledger, monkeypatch):
    ledger.submitted(entry("job"))
    ledger.ended("job")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", REFUSE)
        with pytest.raises(StoreError, match=r"cannot remove the ledger .*/ledger/s1\.jsonl: Not a dir"):
            ledger.close()


def test_users_of_one_group_share_the_folder_and_not_the_files(tmp_path, ledger):
    tmp_path.chmod(0o2775)
    ledger.submitted(entry("job"))
    modes = [path.stat().st_mode & 0o7777 for path in (ledger.folder, ledger.path, file_of(tmp_path, "job"))]
    assert modes == [0o2775, 0o600, 0o600]


@pytest.mark.parametrize("name", ["s1", "job@s1"])
def test_a_file_that_others_could_have_written_is_left_alone(tmp_path, ledger, name):
    ledger.submitted(entry("job"))
    path = tmp_path / "ledger" / f"{name}.jsonl"
    rewrite_owner(ledger.path, start=1)
    path.chmod(0o660)
    assert ids(claim(tmp_path, "me").adopted) == []
    (note,) = open_entries(tmp_path).left_alone
    assert f"{path}: cannot be read: group {os.getgid()} may change it (mode 0660)" in note


def test_lines_of_jobs_that_outlive_this_machine_are_synced_and_the_names_of_their_files_too(
    ledger, monkeypatch
):
    synced = Mock(side_effect=os.fsync)
    monkeypatch.setattr(os, "fsync", synced)
    for write, arguments, count in (
        (ledger.submitted, [entry("a", scheduler="local")], 0),
        (ledger.accepted, ["a", "12"], 0),
        (ledger.ended, ["a"], 0),
        (ledger.submitted, [entry("b")], 2),
        (ledger.accepted, ["b", "12"], 1),
        (ledger.ended, ["b"], 0),  # one that comes back after a power cut is ended once more
    ):
        synced.reset_mock()
        write(*arguments)
        assert synced.call_count == count, arguments


def test_the_schedulers_own_id_is_known_from_a_second_line(tmp_path, ledger):
    ledger.submitted(entry("a"))
    ledger.accepted("a", "4711")
    ledger.accepted("never submitted", "1")
    assert read_allocation(file_of(tmp_path, "a")).entry.native_id == "4711"


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


def test_detaching_writes_the_lease_last_and_nothing_comes_after_it(tmp_path, ledger):
    ledger.submitted(entry("a"))
    ledger.detach(4 * 10**18)
    lease, left = {"event": "lease", "until_ns": 4 * 10**18}, {"event": "left"}
    assert lines(ledger.path)[-2:] == [{"schema": 4, **lease}, {"schema": 4, **left}]
    before = file_of(tmp_path, "a").read_bytes()
    for late in (lambda: ledger.submitted(entry("b")), lambda: ledger.accepted("a", "1")):
        with pytest.raises(StoreError, match="it was closed"):
            late()
    ledger.ended("a")
    assert file_of(tmp_path, "a").read_bytes() == before


def test_detaching_with_nothing_open_leaves_no_file(tmp_path, ledger):
    ledger.submitted(entry("a"))
    ledger.ended("a")
    ledger.detach(1)
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "x" * 101, "a b"])
def test_a_name_that_cannot_be_a_files_is_refused(tmp_path, ledger, name):
    with pytest.raises(StoreError, match="cannot be the name of a ledger file"):
        Ledger(tmp_path, name)
    with pytest.raises(StoreError, match="cannot be the name of a ledger file"):
        ledger.submitted(entry(name))


@given(st.data())
def test_any_value_in_any_line_is_read_or_refused_with_a_message(ledger, data):
    session, allocation = ledger.path, ledger.folder / "job@s1.jsonl"
    if not session.exists():
        ledger.submitted(entry("job"))
        ledger.accepted("job", "4711")
        ledger.release(["job"], later())
        ledger.lease(2**62)
        for path in (session, allocation):
            path.with_suffix(".whole").write_bytes(path.read_bytes())
    for path, read in ((session, read_session), (allocation, read_allocation)):
        whole = lines(path.with_suffix(".whole"))
        path.write_text("".join(f"{json.dumps(line)}\n" for line in data.draw(changed(whole))))
        try:
            found = read(path)
        except StoreError as error:
            assert str(path) in str(error)  # noqa: PT017 - either outcome is right
        else:
            lease = found.lease(None) if path == allocation else found.until_ns
            assert lease is None or isinstance(lease, int)
