"""From where on is sent: whatever became of a cursor, a record file or the start, nothing is lost and nothing sent unasked."""

import dataclasses
import json
import os
import re
import time

import pytest
from full_disk import Limited
from nights_of import HOUR, store
from pushing import Server, floats, measured, push, start, stored

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx import schema
from pytest_mlhpc.influx.cursor import begin, cursor_path, pending, read_start, restart, waiting


def now(*numbers, **changes):
    """Return records of these figures that are made now."""
    return [dataclasses.replace(one, created_ns=time.time_ns()) for one in measured(*numbers, **changes)]


def the_cursor(state_dir):
    (path,) = state_dir.glob("influx/cursors/*/*.json")
    return path


def read_cursor(state_dir):
    return json.loads(the_cursor(state_dir).read_text())


# --- the start


def test_what_was_there_before_is_sent_on_request_only(state_dir):
    store(state_dir, now(1, 2), "old")
    said = []
    begin(state_dir, said.append)
    store(state_dir, now(3), "old")  # a session that went on
    store(state_dir, now(4), "new")
    server = Server()
    push(server, state_dir)
    assert server.values == floats(3, 4)
    assert said == [
        "records are sent from now on; what was in 1 record file before is sent by `mlhpc records push --since DATE` only"
    ]
    restart(state_dir, 0)
    assert waiting(state_dir).both == 4
    push(server, state_dir)
    assert server.values == floats(1, 2, 3, 4)


def test_a_line_that_was_not_whole_at_the_start_is_sent_whole(state_dir):
    store(state_dir, now(1, 2), "s1")
    (path,) = state_dir.glob("records/*/s1.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    begin(state_dir, print)
    path.write_bytes(whole)
    server = Server()
    push(server, state_dir)
    assert server.values == [2.0]


def test_old_records_that_come_later_are_counted_and_sent_on_request_only(state_dir):
    """Such as five years of another tool, or the records of another machine."""
    begin(state_dir, print)
    long_ago = time.time_ns() - 24 * HOUR
    store(state_dir, [*measured(1, created_ns=long_ago), *now(2)], "s1")
    server = Server()
    progress, _ = push(server, state_dir)
    assert server.values == [2.0]
    (note,) = progress.notes(state_dir)
    assert note.startswith("not sent: 1 record from before 20")
    assert note.endswith("Z; `mlhpc records push --since DATE` sends older ones")
    assert push(server, state_dir)[0].older.both == 0
    restart(state_dir, long_ago)
    push(server, state_dir)
    assert server.values == floats(1, 2)


def test_a_clock_that_is_some_minutes_behind_loses_nothing(state_dir):
    begin(state_dir, print)
    store(state_dir, measured(1, created_ns=time.time_ns() - HOUR // 2), "s1")
    server = Server()
    push(server, state_dir)
    assert server.values == [1.0]


def test_the_start_is_made_once(state_dir):
    first = begin(state_dir, print)
    store(state_dir, now(1))
    assert begin(state_dir, print) == first == read_start(state_dir)


def test_of_two_first_starts_at_once_the_first_one_holds(state_dir, monkeypatch):
    """The other one has looked for a start, found none, and made its own of later files."""
    first = begin(state_dir, print)
    store(state_dir, now(1))
    with monkeypatch.context() as patch:
        answers = iter([None, first])
        patch.setattr(cursors, "read_start", lambda _state_dir: next(answers))
        assert begin(state_dir, print) == first
    assert read_start(state_dir) == first
    assert [path.name for path in (state_dir / "influx").iterdir() if path.is_file()] == ["start.json"]


def test_a_file_system_without_links_has_a_start_too(state_dir, monkeypatch):
    def refuse(*_arguments, **_named):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "link", refuse)
    assert begin(state_dir, print) == read_start(state_dir)
    assert [path.name for path in (state_dir / "influx").iterdir() if path.is_file()] == ["start.json"]


def test_folders_of_the_former_version_are_left_alone_and_named_once(state_dir):
    for name in ("open", "ready", "sent"):
        (state_dir / "influx" / name).mkdir(parents=True)
    (state_dir / "influx/ready/1.lp").write_text("a v=1 1\n")
    said = []
    begin(state_dir, said.append)
    begin(state_dir, said.append)
    assert said == [f"nothing reads open, ready, sent in {state_dir / 'influx'} any more; remove them"]
    assert (state_dir / "influx/ready/1.lp").exists()


DAMAGED = {
    "empty": "", "torn": '{"made_ns": 1', "a list": "[]", "another field": '{"a": 1}', "no number": '{"made_ns": "x", "since_ns": 1}',
    "no JSON": "\x00\x00", "deep": "[" * 100_000, "newer": '{"schema": 99, "made_ns": 1, "since_ns": 1}',
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_nothing_is_sent_by_a_damaged_start_before_a_date_is_named(state_dir, content):
    stored(state_dir, 1)
    path = state_dir / "influx/start.json"
    path.write_text(content)
    with pytest.raises(StoreError) as refused:
        begin(state_dir, print)
    assert str(refused.value).startswith(f"{path}: damaged: ")
    assert str(refused.value).endswith(
        "nothing is sent before `mlhpc records push --since DATE` says from when on"
    )
    restart(state_dir, 0)
    server = Server()
    push(server, state_dir)
    assert server.values == [1.0]


def test_a_start_that_is_gone_while_cursors_are_there_is_not_made_anew(state_dir):
    stored(state_dir, 1)
    push(Server(), state_dir)
    (state_dir / "influx/start.json").unlink()
    with pytest.raises(
        StoreError, match=r"start\.json: is gone, and cursors are there; nothing is sent before"
    ):
        begin(state_dir, print)


def test_a_start_that_cannot_be_written_is_named_with_the_way_out(state_dir):
    state_dir.mkdir()
    with Limited().full(0), pytest.raises(StoreError) as refused:
        begin(state_dir, print)
    assert (
        "File too large; what is recorded until it can is sent by `mlhpc records push --since DATE` only"
        in str(refused.value)
    )
    assert [path for path in state_dir.rglob("*") if path.is_file()] == []


# --- cursors


def test_a_push_of_nothing_new_opens_no_record_file(state_dir, monkeypatch):
    for number in range(5):
        stored(state_dir, number, session=f"s{number}")
    server = Server()
    push(server, state_dir)
    monkeypatch.setattr(cursors, "read_lines", pytest.fail)
    assert push(server, state_dir)[0].points == 0
    assert len(server.requests) == 1


def test_a_cursor_says_which_file_how_far_and_in_which_form(state_dir):
    path = stored(state_dir, 1)
    push(Server(), state_dir)
    cursor = read_cursor(state_dir)
    assert cursor["offset"] == path.stat().st_size
    assert cursor["form"] == schema.FORM
    assert re.fullmatch("[0-9a-f]{64}", cursor["first_line"])
    assert the_cursor(state_dir) == state_dir / "influx/cursors" / path.parent.name / "s1.json"


def rewritten(state_dir, **changes):
    """Change fields of the one cursor."""
    the_cursor(state_dir).write_text(json.dumps({**read_cursor(state_dir), **changes}))


BROKEN = {
    **{name: text for name, text in DAMAGED.items() if name != "newer"},
    "newer": '{"schema": 99, "first_line": "", "offset": 1, "mtime_ns": 1, "start": 1}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_cursor_is_named_and_its_file_sent_again(state_dir, content):
    stored(state_dir, 1, 2)
    server = Server()
    push(server, state_dir)
    path = the_cursor(state_dir)
    path.write_text(content)
    _, (said,) = push(server, state_dir)
    assert said.startswith(f"{path}: damaged: ")
    assert said.endswith("s1.jsonl holds is sent again")
    assert [len(request) for request in server.requests] == [4, 4]
    assert server.values == floats(1, 2)
    assert push(server, state_dir)[1] == []


def test_a_cursor_that_is_too_long_is_damaged_whatever_it_says(state_dir):
    stored(state_dir, 1)
    push(Server(), state_dir)
    path = the_cursor(state_dir)
    path.write_text(path.read_text() + " " * 5000)
    _, (said,) = push(Server(), state_dir)
    assert said.startswith(f"{path}: damaged: longer than 4096 bytes; what ")


@pytest.mark.parametrize("offset", [10**9, -1, 5], ids=["beyond the file", "negative", "within a line"])
def test_a_cursor_at_an_impossible_place_starts_its_file_again(state_dir, offset):
    path = stored(state_dir, 1, 2)
    server = Server()
    push(server, state_dir)
    rewritten(state_dir, offset=offset)
    _, said = push(server, state_dir)
    assert said == [
        f"{path}: is not the file that was sent, or shorter; it is sent again from its first line"
    ]
    assert server.values == floats(1, 2)
    assert waiting(state_dir).both == 0


def replaced(path, *numbers):
    """Put another file in the place of *path*, as a restored backup may be."""
    other = path.with_name("other")
    store(path.parents[2] / "elsewhere", measured(*numbers), "s1")
    (made,) = (path.parents[2] / "elsewhere").glob("records/*/s1.jsonl")
    made.rename(other)
    other.rename(path)


@pytest.mark.parametrize("numbers", [(7,), (7, 8), (7, 8, 9, 6)], ids=["shorter", "as long", "longer"])
def test_another_file_of_the_same_name_is_sent_from_its_start(state_dir, numbers):
    path = stored(state_dir, 1, 2)
    server = Server()
    push(server, state_dir)
    replaced(path, *numbers)
    _, said = push(server, state_dir)
    assert len(said) == 1
    assert server.values == sorted(floats(1, 2, *numbers))
    assert waiting(state_dir).both == 0


def test_a_backup_of_the_same_file_with_fewer_records_goes_on_when_new_ones_come(state_dir):
    path = stored(state_dir, 1, 2)
    server = Server()
    push(server, state_dir)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    push(server, state_dir)
    stored(state_dir, 3)
    push(server, state_dir)
    assert server.values == floats(1, 2, 3)


def test_a_restored_copy_with_another_inode_and_time_is_not_sent_again(state_dir):
    path = stored(state_dir, 1, 2)
    server = Server()
    push(server, state_dir)
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(1, 1))
    copy.rename(path)
    assert push(server, state_dir)[1] == []
    assert len(server.requests) == 1
    assert list(pending(state_dir, start(state_dir), print)) == []


def test_a_file_that_is_shorter_than_at_the_start_is_another_one(state_dir):
    store(state_dir, now(1, 2), "s1")
    begin(state_dir, print)
    (path,) = state_dir.glob("records/*/s1.jsonl")
    store(state_dir / "elsewhere", now(3), "s1")
    (other,) = state_dir.glob("elsewhere/records/*/s1.jsonl")
    other.rename(path)
    server = Server()
    push(server, state_dir)
    assert server.values == [3.0]


def test_a_cursor_of_a_file_that_is_gone_is_forgotten(state_dir):
    gone = stored(state_dir, 1, session="s1")
    stored(state_dir, 2, session="s2")
    server = Server()
    push(server, state_dir)
    gone.unlink()
    push(server, state_dir)
    assert the_cursor(state_dir).name == "s2.json"
    assert server.values == floats(1, 2)


def test_another_form_of_lines_sends_nothing_old_again_and_is_named(state_dir):
    stored(state_dir, 1)
    server = Server()
    push(server, state_dir)
    rewritten(state_dir, form=schema.FORM + 1)
    assert push(server, state_dir)[0].points == 0
    stored(state_dir, 2)
    progress, _ = push(server, state_dir)
    assert [len(request) for request in server.requests] == [2, 2]
    assert progress.notes(state_dir) == [
        f"records are written as points of form {schema.FORM} now; earlier points of 1 file stay in InfluxDB as they are"
    ]
    assert read_cursor(state_dir)["form"] == schema.FORM
    assert push(server, state_dir)[0].notes(state_dir) == []


def linked(path, folder):
    target = folder / "target"
    target.write_text(path.read_text())
    path.unlink()
    path.symlink_to(target)


def owned(path, _folder):
    os.chown(path, 12345, -1)


def piped(path, _folder):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [(linked, "is a link"), (owned, "belongs to user 12345"), (piped, "is no regular file")],
    ids=["link", "owner", "pipe"],
)
def test_a_cursor_that_may_not_be_obeyed_is_named_and_replaced(state_dir, tmp_path, change, why):
    if change is owned and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    stored(state_dir, 1)
    server = Server()
    push(server, state_dir)
    change(the_cursor(state_dir), tmp_path)
    before = {path: path.read_text() for path in tmp_path.glob("target")}
    _, (said,) = push(server, state_dir)
    assert said.startswith(f"{the_cursor(state_dir)}: {why} and is not obeyed; what ")
    assert len(server.requests) == 2
    assert {path: path.read_text() for path in tmp_path.glob("target")} == before
    assert not the_cursor(state_dir).is_symlink()
    assert push(server, state_dir)[1] == []


def test_users_who_share_a_state_directory_obey_each_others_cursors(state_dir):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    state_dir.mkdir()
    state_dir.chmod(0o2770)
    stored(state_dir, 1)
    server = Server()
    push(server, state_dir)
    os.chown(the_cursor(state_dir), 12345, -1)
    assert push(server, state_dir)[1] == []
    assert len(server.requests) == 1
    folders = [path for path in (state_dir / "influx").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o7777 for path in folders} == {0o2775}


def test_users_who_share_a_state_directory_can_read_each_others_files_whatever_the_umask(state_dir):
    state_dir.mkdir()
    state_dir.chmod(0o2770)
    before = os.umask(0o077)
    try:
        stored(state_dir, 1, 2)
        push(Server(lambda line: " value=2.0," in line), state_dir)
    finally:
        os.umask(before)
    files = [path for path in (state_dir / "influx").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o664}


def test_a_folder_in_the_place_of_a_cursor_is_named_and_costs_only_sending(state_dir):
    path = stored(state_dir, 1)
    cursor_path(state_dir, f"{path.parent.name}/s1.jsonl").mkdir(parents=True)
    server = Server()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"s1\.json: cannot be written: Is a directory; all was sent"):
            push(server, state_dir)
    assert server.values == [1.0]


def test_a_full_disk_at_the_cursor_is_named_and_what_was_sent_is_sent_again(state_dir):
    stored(state_dir, 1)
    server = Server()
    with (
        Limited().full(0),
        pytest.raises(StoreError, match="File too large; all was sent, and some of it will be"),
    ):
        push(server, state_dir)
    assert server.values == [1.0]
    assert waiting(state_dir).both == 1
    push(server, state_dir)
    assert server.values == [1.0]
    assert waiting(state_dir).both == 0


def test_a_session_without_a_whole_line_has_no_cursor_yet(state_dir):
    path = stored(state_dir, 1)
    path.write_bytes(path.read_bytes()[:-1])
    server = Server()
    assert push(server, state_dir)[1] == []
    assert list(state_dir.glob("influx/cursors/*/*")) == []
    assert start(state_dir).since_ns == 0
