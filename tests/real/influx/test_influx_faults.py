"""Every way in which a real InfluxDB, its network or a push can fail: no point is lost, and none is there twice."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from nights_of import store
from over_time_services import Influx
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.influx.cursor import rejected_folder, restart, waiting
from pytest_mlhpc.influx.push import InfluxSink, Sender, Sink, UnavailableError, push_records
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.store.record import Record

pytestmark = pytest.mark.servers
LATER = 75


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Influx], None]:
    """Point `mlhpc` to a server."""

    def use(influxdb: Influx, **more: str) -> None:
        for name, value in {**influxdb.environment, **more}.items():
            monkeypatch.setenv(name, value)

    return use


def recorded(state_dir: Path, *numbers: int) -> Path:
    """Record these figures where all since ever are to be sent; return the file."""
    if not (state_dir / "influx/start.json").exists():
        restart(state_dir, 0)
    store(state_dir, [record(number, measurement=measurement(float(number))) for number in numbers])
    (path,) = state_dir.glob("records/*/s1.jsonl")
    return path


def values(influxdb: Influx) -> list[float]:
    return sorted(row["value"] for row in influxdb.ask("SELECT value FROM mlhpc_metric"))


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
    recorded(state_dir, 1, 2, 3)
    influxdb.fault(fault)
    assert main(["records", "push", "--wait", "0"]) == LATER
    said = capsys.readouterr().err
    assert words in said
    assert "3 records left to send: try again later" in said
    assert influxdb.count("mlhpc_run") == 0
    influxdb.fault("")
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [1.0, 2.0, 3.0]
    assert waiting(state_dir).both == 0


def test_a_passing_fault_is_waited_for(influxdb: Influx, state_dir: Path, use: Callable[..., None]) -> None:
    use(influxdb)
    recorded(state_dir, 1, 2)
    influxdb.fault("503 1")
    assert main(["records", "push", "--wait", "600"]) == 0
    assert values(influxdb) == [1.0, 2.0]


def test_a_connection_that_is_cut_after_the_write_leaves_each_point_once(
    influxdb: Influx, state_dir: Path, use: Callable[..., None]
) -> None:
    use(influxdb)
    recorded(state_dir, 1, 2)
    influxdb.fault("cut 1")
    assert main(["records", "push", "--wait", "0"]) == LATER
    assert values(influxdb) == [1.0, 2.0]  # it was written, and the client cannot know
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [1.0, 2.0]


def test_one_poison_line_of_a_thousand_costs_only_itself_and_is_sent_when_it_is_mended(
    influxdb: Influx,
    state_dir: Path,
    use: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def poisoned(one: Record) -> list[str]:
        return [line.replace(" value=321.0,", ' value="much",') for line in lines_of(one)]

    use(influxdb)
    recorded(state_dir, 0)
    assert main(["records", "push"]) == 0  # now the server knows that a value is a float
    monkeypatch.setattr("pytest_mlhpc.influx.push.lines_of", poisoned)
    recorded(state_dir, *range(1, 500))
    assert main(["records", "push"]) == 1
    assert values(influxdb) == [float(number) for number in range(500) if number != 321]
    assert influxdb.count("mlhpc_run") == 500
    (aside,) = rejected_folder(state_dir).iterdir()
    (row,) = map(json.loads, aside.read_text(encoding="utf-8").splitlines())
    assert 'value="much"' in row["line"]
    assert "field type conflict" in row["reason"]
    said = capsys.readouterr().out
    assert "the server refused 1 line (1: 400: " in said
    assert 'field type conflict: input field "value" on measurement "mlhpc_metric"' in said
    assert f"which lie in {aside.parent}; `mlhpc records push --retry-rejected` sends them once more" in said
    assert waiting(state_dir).both == 0
    assert main(["records", "push", "--retry-rejected"]) == 1
    assert [path.name for path in aside.parent.iterdir()] == [aside.name]
    aside.write_text(
        aside.read_text(encoding="utf-8").replace('value=\\"much\\"', "value=321.0"), encoding="utf-8"
    )
    assert main(["records", "push", "--retry-rejected"]) == 0
    assert values(influxdb) == [float(number) for number in range(500)]
    assert list(aside.parent.iterdir()) == []


def test_a_server_that_is_killed_in_mid_write_has_everything_in_the_end(
    own_influxdb: Influx, state_dir: Path
) -> None:
    recorded(state_dir, *range(60))
    start = restart(state_dir, 0)
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

    def push(sink: Sink) -> None:
        push_records(Sender(sink, state_dir), start, pytest.fail)

    with InfluxSink(server, timeout_s=600) as sink, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_mlhpc.influx.push.CHUNK_LINES", 20)
        with pytest.raises(UnavailableError):
            push(Killing(sink))
    assert 0 < waiting(state_dir).both < 60
    with InfluxSink(server, timeout_s=600) as sink:
        with pytest.raises(UnavailableError):  # it is down for the whole session
            push(sink)
        own_influxdb.service.start()
        push(sink)
    assert values(own_influxdb) == [float(number) for number in range(60)]
    assert own_influxdb.count("mlhpc_run") == 60
    assert waiting(state_dir).both == 0


PUSHING = """
import os, signal, sys
from pathlib import Path
from pytest_mlhpc.influx import cursor, push
from pytest_mlhpc.influx.credentials import server_of

left = int(sys.argv[2])
real = push.cursors.write_cursor

def deadly(*arguments):
    global left
    left -= 1
    if left == 0 and sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

push.CHUNK_LINES, push.cursors.write_cursor = 10, deadly
state = Path(sys.argv[1])
with push.InfluxSink(server_of(os.environ), timeout_s=600) as sink:
    push.push_records(push.Sender(sink, state, lanes=2), cursor.read_start(state), print)
"""


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_that_is_killed_at_a_cursor_leaves_each_point_once(
    influxdb: Influx, state_dir: Path, use: Callable[..., None], number: int, when: str
) -> None:
    use(influxdb)
    recorded(state_dir, *range(20))
    command = [sys.executable, "-c", PUSHING, str(state_dir), str(number), when]
    assert subprocess.run(command, check=False, timeout=1200).returncode == -signal.SIGKILL
    assert waiting(state_dir).both == 20 - 5 * (number - (when == "before"))
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [float(one) for one in range(20)]
    assert influxdb.count("mlhpc_run") == 20
    assert waiting(state_dir).both == 0


def test_a_newer_record_is_named_and_waits_and_the_others_are_sent(
    influxdb: Influx, state_dir: Path, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(influxdb)
    path = recorded(state_dir, 0, 1, 2)
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    lines[1] = lines[1].rstrip("}\n").rpartition('"schema":')[0] + '"schema":99}\n'
    path.write_text("".join(lines), encoding="utf-8")
    for _ in range(2):
        assert main(["records", "push"]) == 1
        assert "schema 99 is newer" in capsys.readouterr().err
    assert values(influxdb) == [0.0, 2.0]
    path.write_text(whole, encoding="utf-8")  # stands for the version that reads it
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [0.0, 1.0, 2.0]


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
    recorded(state_dir, 1)
    assert main(["records", "push", "--check"]) == 1
    assert main(["records", "push", "--wait", "0"]) == LATER
    said = "".join(capsys.readouterr())
    assert "check MLHPC_INFLUX_TOKEN" in said
    assert "wr0ng-Secret" not in said
    assert waiting(state_dir).both == 1
    use(closed_influxdb)
    assert main(["records", "push", "--check"]) == 0
    assert main(["records", "push"]) == 0
    assert values(closed_influxdb) == [1.0]
