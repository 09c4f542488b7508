"""The spool: what was added is there, what was torn is not, whoever died between any two steps."""

import errno
import os
import time

import pytest

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.spool import Writer, adopt, frames, spool_of, waiting


def spooled(state_dir):
    """Return the lines of everything that waits."""
    return [frame.lines for path in waiting(spool_of(state_dir)) for frame in frames(path) if frame.whole]


def dead_writers_file(state_dir, content):
    """Write what a process left that is gone."""
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    folder = spools.make_folders(state_dir) / "open"
    host = os.uname().nodename.replace("-", "_")
    path = folder / f"1-{host}-{child}-12345-00000000.lp"
    path.write_bytes(content)
    return path


def test_what_was_added_is_there_before_the_file_is_closed(state_dir):
    writer = Writer(state_dir)
    writer.add(["a v=1 1", "b v=1 1"])
    writer.add(["c v=1 1"])
    assert spooled(state_dir) == [b"a v=1 1\nb v=1 1\n", b"c v=1 1\n"]
    (path,) = waiting(spool_of(state_dir))
    assert path.parent.name == "open"
    writer.close()
    (path,) = waiting(spool_of(state_dir))
    assert path.parent.name == "ready"


@pytest.mark.parametrize("cut", [1, 2, 9, 15, 20, 30])
def test_a_torn_end_is_never_seen(state_dir, cut):
    """Half a line could be a whole one with another figure."""
    whole = spools.frame(["a v=1 1"])
    torn = spools.frame(["b v=123456 1", "c v=2 1"])
    dead_writers_file(state_dir, whole + torn[:-cut])
    assert spooled(state_dir) == [b"a v=1 1\n"]


def test_damage_in_the_middle_costs_one_record_and_is_told(state_dir):
    parts = [spools.frame([f"m{number} v=1 1"]) for number in range(3)]
    parts[1] = parts[1].replace(b"v=1", b"v=7")
    path = dead_writers_file(state_dir, b"".join(parts))
    found = list(frames(path))
    assert [frame.whole for frame in found] == [True, False, True]
    assert found[-1].end == path.stat().st_size


def test_reading_goes_on_where_it_ended(state_dir):
    path = dead_writers_file(state_dir, b"".join(spools.frame([f"m{number} v=1 1"]) for number in range(3)))
    first = next(iter(frames(path)))
    assert [frame.lines for frame in frames(path, first.end)] == [b"m1 v=1 1\n", b"m2 v=1 1\n"]


def test_a_dead_writers_file_is_adopted_and_a_living_ones_is_not(state_dir):
    left = dead_writers_file(state_dir, spools.frame(["a v=1 1"]))
    writer = Writer(state_dir)
    writer.add(["b v=1 1"])
    assert adopt(spool_of(state_dir)) == [left.name]
    assert [path.parent.name for path in waiting(spool_of(state_dir))] == ["ready", "open"]
    writer.close()


def test_another_machines_file_is_adopted_only_after_weeks(state_dir):
    folder = spools.make_folders(state_dir) / "open"
    path = folder / "1-elsewhere-1-1-00000000.lp"
    path.write_bytes(spools.frame(["a v=1 1"]))
    assert adopt(spool_of(state_dir)) == []
    assert spooled(state_dir) == [b"a v=1 1\n"]  # it is sent all the same
    long_ago = time.time() - spools.ABANDONED_S - 60
    os.utime(path, (long_ago, long_ago))
    assert adopt(spool_of(state_dir)) == [path.name]


@pytest.mark.parametrize("removed", [False, True], ids=["moved", "moved-and-removed"])
def test_a_writer_that_was_taken_for_dead_loses_nothing(state_dir, removed):
    writer = Writer(state_dir)
    writer.add(["a v=1 1"])
    assert writer.path is not None
    moved = writer.path.rename(spool_of(state_dir) / "ready" / writer.path.name)
    if removed:
        moved.unlink()
    writer.add(["b v=1 1"])
    writer.close()
    assert b"b v=1 1\n" in spooled(state_dir)


def test_a_full_disk_is_named_and_the_next_record_goes_into_another_file(state_dir, monkeypatch):
    writer = Writer(state_dir)
    writer.add(["a v=1 1"])
    real = os.write
    left = iter([5])

    def write(descriptor, data):
        for most in left:  # the first call takes five bytes, the next one says why
            return real(descriptor, bytes(data)[:most])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreError, match="No space left on device") as refused:
        writer.add(["b v=1 1"])
    assert str(spool_of(state_dir)) in str(refused.value)
    monkeypatch.setattr(os, "write", real)
    writer.add(["c v=1 1"])
    writer.close()
    assert spooled(state_dir) == [b"a v=1 1\n", b"c v=1 1\n"]
    assert len(waiting(spool_of(state_dir))) == 2


def test_a_note_of_a_file_that_is_gone_is_forgotten(state_dir):
    path = dead_writers_file(state_dir, spools.frame(["a v=1 1"]))
    spool = spool_of(state_dir)
    spools.note_sent(spool, path.name, 5)
    spools.note_sent(spool, "1-gone-1-1-00000000.lp", 5)
    spools.forget_marks(spool)
    assert spools.sent(spool, path.name) == 5
    assert spools.sent(spool, "1-gone-1-1-00000000.lp") == 0


def test_a_spool_that_cannot_be_made_is_named(state_dir):
    state_dir.mkdir()
    (state_dir / "influx").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="points for InfluxDB cannot be stored") as refused:
        Writer(state_dir).add(["a v=1 1"])
    assert str(state_dir / "influx") in str(refused.value)
