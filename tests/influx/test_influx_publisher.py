"""What a session does for InfluxDB: no outcome hangs on it, and the summary says what waits."""

import socket

import pluggy
import pytest
from worlds import record

from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.publisher import Publisher, register
from pytest_mlhpc.influx.spool import spool_of


@pytest.fixture
def silent():
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def publish(state_dir):
    """Return what ends a session with one record, and says what it told."""

    def run(url, *, hurry=False, limit_s=600, **more):
        publisher = Publisher(state_dir, {"MLHPC_INFLUX_URL": url, **more}, limit_s=limit_s)
        publisher.mlhpc_record(record(1))
        return end(publisher, hurry=hurry)

    return run


def end(publisher, *, hurry=False):
    told = []
    publisher.mlhpc_records_end(tell=told.append, hurry=hurry)
    return told


def frames_waiting(state_dir):
    return sum(1 for path in spools.waiting(spool_of(state_dir)) for _ in spools.frames(path))


def test_without_a_server_nothing_is_written(state_dir):
    manager = pluggy.PluginManager("pytest_mlhpc")
    register(manager, state_dir, {})
    assert not manager.get_plugins()
    register(manager, state_dir, {"MLHPC_INFLUX_URL": "http://localhost:8086"})
    register(manager, state_dir, {"MLHPC_INFLUX_URL": "http://localhost:8086"})
    assert len(manager.get_plugins()) == 1
    assert not state_dir.exists()


def test_a_server_that_never_answers_delays_the_end_by_no_more_than_its_limit(state_dir, silent, publish):
    (told,) = publish(silent, limit_s=0.05)
    assert "not all records were sent within 0.05 s" in told
    assert "`mlhpc records push`" in told
    assert frames_waiting(state_dir) == 1


@pytest.mark.parametrize("url", ["nonsense", "http://user:s3cret@localhost"])
def test_a_wrong_address_is_told_at_the_end_and_the_records_wait(state_dir, publish, url):
    (told,) = publish(url)
    assert "not sent: MLHPC_INFLUX_URL" in told
    assert "s3cret" not in told
    assert frames_waiting(state_dir) == 1


@pytest.mark.parametrize(
    "more", [{"MLHPC_INFLUX_PUSH": "no"}, {"hurry": True}], ids=["told-not-to", "told-to-end"]
)
def test_a_session_may_only_fill_the_spool(state_dir, silent, publish, more):
    assert publish(silent, **more) == []
    (path,) = spools.waiting(spool_of(state_dir))
    assert path.parent.name == "ready"


@pytest.fixture
def in_the_way(state_dir):
    """A file where the spool's folder should be."""
    state_dir.mkdir()
    (state_dir / "influx").write_text("in the way")
    return state_dir / "influx"


def test_a_spool_that_could_not_be_written_is_tried_again_at_the_end(state_dir, silent, in_the_way):
    publisher = Publisher(state_dir, {"MLHPC_INFLUX_URL": silent, "MLHPC_INFLUX_PUSH": "no"})
    publisher.mlhpc_record(record(1))
    in_the_way.unlink()
    publisher.mlhpc_record(record(2))
    assert end(publisher) == []
    assert frames_waiting(state_dir) == 2


def test_records_that_never_got_into_the_spool_are_counted_and_the_way_out_is_named(
    state_dir, silent, in_the_way
):
    publisher = Publisher(state_dir, {"MLHPC_INFLUX_URL": silent})
    for number in range(3):
        publisher.mlhpc_record(record(number))
    (told,) = end(publisher)
    parts = ("3 records are in the store only", "`mlhpc records push --all`", str(in_the_way))
    assert [part for part in parts if part not in told] == []
