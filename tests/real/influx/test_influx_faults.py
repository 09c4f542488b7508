"""Every way in which a real InfluxDB, its network, a disk or a writer can fail: no point is lost, and none is there twice."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from nights_of import store
from over_time_services import Influx
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.influx.push import InfluxSink, Sender, UnavailableError, push_spool
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.influx.spool import Writer, spool_of

pytestmark = pytest.mark.servers
LATER = 75


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Influx], None]:
    """Point `mlhpc` to a server."""

    def use(influxdb: Influx, **more: str) -> None:
        for name, value in {**influxdb.environment, **more}.items():
            monkeypatch.setenv(name, value)

    return use


def spool(state_dir: Path, *numbers: int) -> Path:
    writer = Writer(state_dir)
    for number in numbers:
        writer.add(lines_of(record(number, measurement=measurement(float(number)))))
    writer.close()
    return spool_of(state_dir)


def values(influxdb: Influx) -> list[float]:
    return sorted(row["value"] for row in influxdb.ask("SELECT value FROM mlhpc_metric"))


def nothing_waits(folder: Path) -> bool:
    return spools.waiting(folder) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("503", "503"),
        ("429", "429"),
        ("401", "check MLHPC_INFLUX_TOKEN"),
        ("404", "MLHPC_INFLUX_BUCKET"),
        ("reset", "does not answer"),
    ],
)
def test_a_server_that_does_not_take_points_gets_them_later(  # noqa: PLR0917 - pytest passes by name
    influxdb: Influx,
    state_dir: Path,
    use: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    fault: str,
    words: str,
) -> None:
    use(influxdb)
    folder = spool(state_dir, 1, 2, 3)
    influxdb.fault(fault)
    assert main(["records", "push", "--wait", "0"]) == LATER
    said = capsys.readouterr().err
    assert words in said
    assert "try again later" in said
    assert influxdb.count("mlhpc_run") == 0
    influxdb.fault("")
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [1.0, 2.0, 3.0]
    assert nothing_waits(folder)


def test_a_passing_fault_is_waited_for(influxdb: Influx, state_dir: Path, use: Callable[..., None]) -> None:
    use(influxdb)
    spool(state_dir, 1, 2)
    influxdb.fault("503 1")
    assert main(["records", "push", "--wait", "600"]) == 0
    assert values(influxdb) == [1.0, 2.0]


def test_a_connection_that_is_cut_after_the_write_leaves_each_point_once(
    influxdb: Influx, state_dir: Path, use: Callable[..., None]
) -> None:
    use(influxdb)
    spool(state_dir, 1, 2)
    influxdb.fault("cut 1")
    assert main(["records", "push", "--wait", "0"]) == LATER
    assert values(influxdb) == [1.0, 2.0]  # it was written, and the client cannot know
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [1.0, 2.0]


def test_one_poison_line_of_a_thousand_costs_only_itself(
    influxdb: Influx, state_dir: Path, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(influxdb)
    folder = spool(state_dir, 0)
    assert main(["records", "push"]) == 0  # now the server knows that a value is a float
    writer = Writer(state_dir)
    for number in range(1, 500):
        lines = lines_of(record(number, measurement=measurement(float(number))))
        poison = number == 321
        writer.add([line.replace(" value=321.0,", ' value="much",') for line in lines] if poison else lines)
    writer.close()
    assert main(["records", "push"]) == 1
    assert values(influxdb) == [float(number) for number in range(500) if number != 321]
    assert influxdb.count("mlhpc_run") == 500
    (aside,) = (folder / "rejected").iterdir()
    (row,) = map(json.loads, aside.read_text(encoding="utf-8").splitlines())
    assert 'value="much"' in row["line"]
    assert "field type conflict" in row["reason"]
    assert "field type conflict" in capsys.readouterr().out
    assert nothing_waits(folder)


def test_a_server_that_is_killed_in_mid_write_has_everything_in_the_end(
    own_influxdb: Influx, state_dir: Path
) -> None:
    folder = spool(state_dir, *range(60))
    server = server_of(own_influxdb.environment)

    class Killing:
        """Sends, and has the server killed while the second request is under way."""

        requests = 0

        def __init__(self, sink: InfluxSink) -> None:
            self._sink = sink

        def write(self, lines: bytes) -> None:
            self.requests += 1
            if self.requests == 2:
                killer = threading.Thread(target=own_influxdb.service.kill, args=["influxd"])
                killer.start()
                try:
                    self._sink.write(lines)
                finally:
                    killer.join()
            self._sink.write(lines)

    with InfluxSink(server, timeout_s=600) as sink, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_mlhpc.influx.push.CHUNK_LINES", 20)
        with pytest.raises(UnavailableError):
            push_spool(Sender(Killing(sink), folder / "rejected"), folder)
    assert not nothing_waits(folder)
    with InfluxSink(server, timeout_s=600) as sink:
        with pytest.raises(UnavailableError):  # it is down for the whole session
            push_spool(Sender(sink, folder / "rejected"), folder)
        own_influxdb.service.start()
        push_spool(Sender(sink, folder / "rejected"), folder)
    assert values(own_influxdb) == [float(number) for number in range(60)]
    assert own_influxdb.count("mlhpc_run") == 60
    assert nothing_waits(folder)


SYSTEM_CALLS = ("open", "write", "fsync", "close", "rename")


@pytest.mark.parametrize("call", SYSTEM_CALLS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_at_any_step_loses_nothing_that_it_said_was_stored(
    influxdb: Influx, state_dir: Path, use: Callable[..., None], call: str, when: str
) -> None:
    use(influxdb)
    told, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        _write_and_die(state_dir, call, when, say)
    os.close(say)
    with open(told, "rb") as pipe:  # noqa: PTH123 - a descriptor
        acknowledged = len(pipe.read())
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert main(["records", "push"]) == 0
    found = values(influxdb)
    assert found[:acknowledged] == [float(number) for number in range(acknowledged)]
    assert len(found) == len(set(found)) <= acknowledged + 1
    assert influxdb.count("mlhpc_run") == len(found)
    assert nothing_waits(spool_of(state_dir))


def _write_and_die(state_dir: Path, call: str, when: str, say: int) -> None:
    """Add records; be killed when this system call is made the first, second or third time, or at the end."""
    tell = os.write
    real = getattr(os, call)
    left = [{"close": 1, "rename": 1, "open": 2}.get(call, 3)]

    def deadly(*arguments: object, **named: object) -> object:
        left[0] -= 1
        if not left[0] and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    try:
        lines = [lines_of(record(number, measurement=measurement(float(number)))) for number in range(5)]
        setattr(os, call, deadly)
        writer = Writer(state_dir)
        for some in lines:
            writer.add(some)
            tell(say, b".")
        writer.close()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_newer_record_in_the_store_is_named_and_the_others_are_sent(
    influxdb: Influx, state_dir: Path, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(influxdb)
    store(state_dir, [record(number, measurement=measurement(float(number))) for number in range(3)])
    (path,) = state_dir.glob("records/*/*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[1] = lines[1].rstrip("}\n").rpartition('"schema":')[0] + '"schema":99}\n'
    path.write_text("".join(lines), encoding="utf-8")
    for _ in range(2):
        assert main(["records", "push", "--all"]) == 0
        assert "schema 99 is newer" in capsys.readouterr().err
    assert values(influxdb) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        pytest.param({}, 0, ["write    ok", "read     ok"], id="what works"),
        pytest.param({"BUCKET": "nowhere"}, 1, ["bucket or database 'nowhere'"], id="a missing database"),
        pytest.param(
            {"URL": "http://127.0.0.1:9"},
            LATER,
            ["http://127.0.0.1:9 does not answer"],
            id="a server that is not there",
        ),
    ],
)
def test_check_names(  # noqa: PLR0917 - pytest passes by name
    influxdb: Influx,
    use: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    code: int,
    words: list[str],
) -> None:
    use(influxdb, **{f"MLHPC_INFLUX_{name}": value for name, value in changes.items()})
    assert main(["records", "push", "--check"]) == code
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == []


def test_a_wrong_password_is_named_and_not_shown(
    closed_influxdb: Influx, state_dir: Path, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(closed_influxdb, MLHPC_INFLUX_TOKEN="admin:wr0ng-Secret")
    folder = spool(state_dir, 1)
    assert main(["records", "push", "--check"]) == 1
    assert main(["records", "push", "--wait", "0"]) == LATER
    said = "".join(capsys.readouterr())
    assert "check MLHPC_INFLUX_TOKEN" in said
    assert "wr0ng-Secret" not in said
    assert not nothing_waits(folder)
    use(closed_influxdb)
    assert main(["records", "push", "--check"]) == 0
    assert main(["records", "push"]) == 0
    assert values(closed_influxdb) == [1.0]
