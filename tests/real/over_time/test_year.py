"""A year of nights on three systems, through a real InfluxDB, to a real mail server and a webhook: what is told, and when.

Each night's records are pushed, then `mlhpc alert send` is run as a schedule would. All that was planted is told, once, in the
right night, and nothing else.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from http_sink import HttpSink
from mail_sink import MailSink
from over_time_services import Influx
from yearly import SYSTEMS, Slow, Year, night_ns

from pytest_mlhpc.alert.book import book_path, read_book
from pytest_mlhpc.cli import main
from pytest_mlhpc.history.events import add, new_event
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.store.text import iso

pytestmark = pytest.mark.servers

_PLANTED = yaml.safe_load(Path(__file__).with_name("year.yaml").read_text(encoding="utf-8"))
_HAPPENS = _PLANTED["happens"]
YEAR = Year(**{**_HAPPENS, "slow": [Slow(**one) for one in _HAPPENS["slow"]]})
TOLD = list(map(tuple, _PLANTED["told"]))
#: Days after whose first alert the same is run again; after which the book is lost; on which the mail server is down.
TWICE, LOST, DOWN = range(0, 400, 7), {75, 120, 215}, {60, 186, 300}


@dataclass
class Centre:
    """A site: its database, its sinks, its state."""

    influxdb: Influx
    folder: Path
    state_dir: Path
    hook: HttpSink
    mail: MailSink
    year: Year = YEAR
    days: list[int] = field(default_factory=list)  #: of each message at the webhook

    def measure(self, day: int) -> None:
        """Push a night's records."""
        self.influxdb.push(map(lines_of, self.year.night(day)), self.folder)

    def night(self, day: int) -> None:
        """Measure, push, and tell."""
        self.measure(day)
        self._do_by_hand(day)
        self.mail.behaviour.data = "451 try again later" if day in DOWN else "250 OK"
        assert self.alert(day) == (75 if self._waits(day) else 0)
        self.mail.behaviour.data = "250 OK"
        if day in TWICE:
            assert self.alert(day, 6.5) == 0
        if day in LOST:
            assert self.alert(day, 6.6) == 0
            book_path(self.state_dir).unlink()
        self.date_messages(day)

    def date_messages(self, day: int) -> None:
        """Note that the messages that came since the last note came on this day."""
        self.days += [day] * (len(self.hook.requests) - len(self.days))

    def alert(self, day: int, hour: float = 6.0) -> int:
        return main(
            ["alert", "send", "--from", "influx", "--expect", "nightly", "--at", iso(night_ns(day, hour))]
        )

    def _waits(self, day: int) -> bool:
        return day in DOWN and any(day == told for told, *_rest in TOLD)

    def _do_by_hand(self, day: int) -> None:
        """What people do: note an event, acknowledge, accept, mute."""
        if day == 61:
            event = new_event(
                "alps", "", "driver 550 to 570", at_ns=night_ns(60, 0), by="me", now_ns=night_ns(61)
            )
            add(self.state_dir, event)
        if day == 131:
            assert (
                main(["baseline", "accept", self._open("unet"), "--reason", "the new default is safer"]) == 0
            )
        if day == 270:
            assert main(["alert", "mute", "cirrus", "--until", "2099-01-01", "--reason", "maintenance"]) == 0
        if day == 274:
            assert main(["alert", "mute", "cirrus", "--off"]) == 0

    def _open(self, word: str) -> str:
        """Return the alert of a benchmark, as `mlhpc alert list` shows it."""
        book = read_book(self.state_dir, pytest.fail)
        return next(one.id for one in book.incidents if any(word in name for name in one.named))


@pytest.fixture
def centre(
    influxdb: Influx, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Centre]:
    monkeypatch.chdir(tmp_path)
    for name, value in influxdb.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with HttpSink() as hook, MailSink() as mail:
        (tmp_path / "alerts.yaml").write_text(f"""
channels:
  hook: {{type: webhook, url: "{hook.url}/hook", limit_s: 600}}
  mail: {{type: smtp, host: 127.0.0.1, port: {mail.port}, security: none, sender: a@b.org, to: [c@d.org], limit_s: 600}}
""")
        (tmp_path / "systems.yaml").write_text(
            "systems: {cirrus: {partitions: {main: {scheduler: local}}}}\n"
        )
        yield Centre(influxdb, tmp_path, state_dir, hook, mail)


def check(centre: Centre, told: list[tuple[int, int, str, str, str, str]]) -> None:
    """Compare what came with what should have."""
    came = [
        (
            day,
            request.json["state"],
            request.json["kind"],
            request.json["labels"]["system"],
            request.json["title"],
        )
        for day, request in zip(centre.days, centre.hook.requests, strict=True)
    ]
    assert [one[1:4] for one in came] == [one[2:5] for one in told], came
    for (day, *_rest, title), (earliest, late, *_same, words) in zip(came, told, strict=True):
        assert earliest <= day <= earliest + late, (day, title)
        assert words in title, (day, title)
    # Each mail once, whatever became of the server in between; threads and titles as at the webhook.
    titles = [request.json["title"] for request in centre.hook.requests]
    assert sorted(str(mail.content["Subject"]).strip() for mail in centre.mail.mails) == sorted(titles)
    assert len({mail.id for mail in centre.mail.mails}) == len(centre.mail.mails)


@pytest.mark.slow
def test_a_year_is_told_in_as_many_messages_as_it_has_causes(centre, capsys):
    for day in range(YEAR.days):
        centre.night(day)
    check(centre, TOLD)
    texts = [request.json["text"] for request in centre.hook.requests]
    new = next(text for text in texts if "new: alps: all 5 benchmarks" in text)
    assert "Changed then: driver 550 -> 570" in new
    capsys.readouterr()
    page = centre.folder / "year.html"
    assert (
        main(["report", "html", "--from", "influx", "--output", str(page), "--since", iso(night_ns(0, 0))])
        == 0
    )
    assert all(name in page.read_text() for name in (*SYSTEMS, "cosmoflow", "driver 550 to 570"))
    assert main(["report", "grafana", "--output", str(centre.folder / "dashboards")]) == 0
    assert re.search(
        r"mlhpc_metric", "".join(p.read_text() for p in (centre.folder / "dashboards").glob("*.json"))
    )


def test_the_first_regression_and_its_end_through_influxdb(centre):
    centre.year = dataclasses.replace(YEAR, slow=[Slow(60, 64, compute=0.06, systems=["alps"])])
    for day in range(68):
        centre.measure(day)
        if day >= 57:
            assert centre.alert(day) == 0
            centre.date_messages(day)
    check(centre, [
        (60, 0, "new", "regression", "alps", "all 5 benchmarks"),
        (65, 2, "resolved", "regression", "alps", "all 5 benchmarks"),
    ])  # fmt: skip
