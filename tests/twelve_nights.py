"""Twelve nights made for the morning page: what happened in each, through records, events, alerts and a mail server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mail_sink import MailSink
from nights_of import nights, quiet
from nights_of import store as store_records
from yearly import Slow, Year, night_ns

from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.text import iso

#: The day of the night that the page is of, and the hour of the morning after it, UTC.
TONIGHT, MORNING_H = 45, 6.0
#: Modules of commands that ask what time it is.
CLOCKS = ("cli.status", "cli.report", "cli.alert", "alert.book", "cli.options")
REPORT = "https://bench.example.org/report"


class NightWorld:
    """A state directory whose clock stands at the morning after a night, and a mail server."""

    def __init__(self, state_dir: Path, mlhpc: Callable[..., Any], sink: MailSink) -> None:
        self.state_dir, self.mlhpc, self.sink = state_dir, mlhpc, sink
        self.status: tuple[str, ...] = ()  #: options of `mlhpc status`

    def store(self, records: Iterable[Record]) -> None:
        """Append records, in a file of their own, with commits as git names them."""
        found = [
            dataclasses.replace(one, commit=sha256(one.commit.encode()).hexdigest()[:40], **_owner(one))
            for one in records
        ]
        store_records(self.state_dir, found, f"session-{len(list((self.state_dir / 'records').glob('*')))}")

    def alert(self, day: int = TONIGHT) -> None:
        """Send alerts on the morning after a night."""
        self.mlhpc("alert", "send", "--expect", "nightly", "--at", iso(night_ns(day, MORNING_H)))

    def year(self, year: Year, days: Sequence[int] = range(TONIGHT), **changes: Any) -> None:
        """Store these nights, send the alerts of the last of them, then store tonight and send those."""
        self.store(one for day in days for one in year.night(day))
        if days:
            self.alert(days[-1])
        self.store(dataclasses.replace(one, **changes) for one in year.night(TONIGHT))


#: Tests that have an owner, by a part of their identity, in all nights.
OWNERS = {"test_stream": "@hpc/memory", "test_deepcam": "ada@example.org", "test_resnet50": "@vision"}


def _owner(record: Record) -> dict[str, str]:
    """Return the field of a record that says who is asked about it."""
    return {"owner": next((owner for name, owner in OWNERS.items() if name in record.benchmark), "")}


def regressed(record: Record) -> Record:
    """Return the record as a session writes it where re-runs confirm a loss."""
    (rate,) = record.measurement.metrics if record.measurement else ()
    failure = f"regressed: rate {rate.value:.3g} samples/s: {100 - rate.value:.0f} % below 100 (3 of 3 re-runs agree)"
    return dataclasses.replace(record, verdict="regressed", failure=failure)


def nothing(world: NightWorld) -> None:
    world.year(Year())
    world.alert()


def one_node(world: NightWorld) -> None:
    """Vetting leaves a node out. Another one, which it finds fit, was slow in three nights of which no alert was sent."""
    values = [*quiet(TONIGHT - 2), 88.0, 88.3, 87.9]
    stream = nights(
        values,
        benchmark="suites/test_stream.py::test_stream",
        node_id="suites/test_stream.py::test_stream[alps:standard]",
        system="alps",
        last_ns=night_ns(TONIGHT),
    )
    world.store(
        regressed(dataclasses.replace(one, nodes=("n7",)))
        if day > TONIGHT - 3
        else dataclasses.replace(one, nodes=(f"n{day % 6 + 1}",))
        for day, one in enumerate(stream)
    )
    world.store(one for day in range(TONIGHT) for one in Year().night(day))
    world.alert(TONIGHT - 3)
    world.store(Year(unfit=[("alps", "n3", TONIGHT, TONIGHT + 1)]).night(TONIGHT))
    world.alert()


def driver(world: NightWorld) -> None:
    slow = Slow(TONIGHT, TONIGHT + 9, compute=0.08, systems=("cirrus",))
    world.year(Year(slow=[slow], drivers={"cirrus": {0: "550.90", TONIGHT: "570.86"}}))
    when = iso(night_ns(TONIGHT, 0.5))
    world.mlhpc("history", "event", "add", "--system", "cirrus", "--on", when, "driver 550 to 570")
    world.alert()


def file_system(world: NightWorld) -> None:
    hour = Slow(TONIGHT, TONIGHT + 1, io=0.4, systems=("eidf",), workloads=("cosmoflow", "deepcam"))
    world.year(Year(slow=[hour]))
    world.alert()


def maintenance(world: NightWorld) -> None:
    world.year(Year(missing=[("cirrus", TONIGHT, TONIGHT + 1)]))
    until = iso(night_ns(TONIGHT + 1, 8))
    world.mlhpc("alert", "mute", "cirrus", "--until", until, "--reason", "maintenance of the file system")
    world.alert()


def half(world: NightWorld) -> None:
    gone, queued = (("eidf", TONIGHT, TONIGHT + 1), ("cirrus", TONIGHT, TONIGHT + 1))
    world.year(Year(missing=[gone], never=[queued], broken=[("alps", "unet", TONIGHT, TONIGHT + 1)]))
    world.alert()


def commit(world: NightWorld) -> None:
    """The commit of the nights changes every seven days."""
    slow = Slow(49, 60, compute=0.08, systems=("alps", "cirrus"), workloads=("resnet50",))
    year = Year(slow=[slow])
    world.store(one for day in range(49) for one in year.night(day))
    world.alert(48)
    world.store(year.night(49))
    world.alert(49)


def wrong_baseline(world: NightWorld) -> None:
    """The judge compares with a figure that was never reached; the nights are as they were."""

    def judged(record: Record) -> Record:
        if record.system != "cirrus" or "unet" not in record.benchmark or record.attempt:
            return record
        failure = "regressed: effective_throughput 99.8 samples/s: 20 % below 125 (3 of 3 re-runs agree)"
        return dataclasses.replace(record, verdict="regressed", failure=failure)

    year = Year()
    for days in (range(TONIGHT - 3), range(TONIGHT - 3, TONIGHT), (TONIGHT,)):
        found = (one for day in days for one in year.night(day))
        world.store(map(judged, found) if days[-1] >= TONIGHT - 3 else found)
        world.alert(days[-1])


def forty(world: NightWorld) -> None:
    """A benchmark of each of forty systems loses a fifth, each another one."""
    made = [
        one
        for number in range(40)
        for one in nights(
            [*quiet(TONIGHT, seed=number), 70.0 - number / 10],
            benchmark=f"suites/test_{number:02}.py::test_{number:02}",
            node_id=f"suites/test_{number:02}.py::test_{number:02}[site{number:02}:standard]",
            system=f"site{number:02}",
            last_ns=night_ns(TONIGHT),
        )
    ]
    last_ns = night_ns(TONIGHT, 0)
    world.store(one for one in made if one.created_ns < last_ns)
    world.alert(TONIGHT - 1)
    world.store(regressed(one) for one in made if one.created_ns >= last_ns)
    world.alert()


def first(world: NightWorld) -> None:
    world.year(Year(), days=(), verdict="new")
    world.alert()


def influx_away(world: NightWorld) -> None:
    nothing(world)
    world.status = ("--from", "influx")


def wrong_clock(world: NightWorld) -> None:
    world.year(Year())
    ahead = (one for one in Year(systems=("eidf",)).night(TONIGHT + 900) if one.attempt == 0)
    world.store(ahead)
    world.alert()


NIGHTS: dict[str, Callable[[NightWorld], None]] = {
    "nothing-happened": nothing,
    "one-node-slow": one_node,
    "driver-upgrade": driver,
    "file-system-slow-for-an-hour": file_system,
    "maintenance": maintenance,
    "half-of-the-night-missing": half,
    "commit-slows-two-systems": commit,
    "wrong-baseline": wrong_baseline,
    "forty-incidents": forty,
    "first-night": first,
    "influxdb-away": influx_away,
    "clock-wrong": wrong_clock,
}


@pytest.fixture
def night_world(state_dir, mlhpc, tmp_path, monkeypatch):
    """Return a world whose mails go to a server in this process, in the folder of the call."""
    monkeypatch.chdir(tmp_path)
    for name in ("CI_DEFAULT_BRANCH", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:1")
    with MailSink() as sink:
        mail = f"host: 127.0.0.1, port: {sink.port}, security: none, sender: bench@example.org, to: [lead@example.org]"
        (tmp_path / "alerts.yaml").write_text(
            f"report: {REPORT}\nchannels:\n  lead: {{type: smtp, kinds: [morning], limit_s: 300, {mail}}}\n"
        )
        yield NightWorld(state_dir, mlhpc, sink)


def stop_clocks(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    """Let all commands run on the morning after a night."""
    stopped = SimpleNamespace(time_ns=lambda: night_ns(day, MORNING_H + 1))
    for name in CLOCKS:
        monkeypatch.setattr(f"pytest_mlhpc.{name}.time", stopped)
