"""``mlhpc alert drill``: plants known faults into a copy of the site's suites and state, and shows who would have been told."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.alert import drill
from pytest_mlhpc.alert.config import Config, load
from pytest_mlhpc.alert.drill import DrillFolder, LaterNights, RecordingChannel
from pytest_mlhpc.alert.messages import owners_text
from pytest_mlhpc.alert.model import DAY_NS
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport
from pytest_mlhpc.cli.reap import reap_drills
from pytest_mlhpc.config.systems_files import BUILT_IN
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.jobs.spec import run_root
from pytest_mlhpc.judge.losses import ENOUGH
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.plan import DELAYS, FAULTS, MISSING_NIGHT, SLOW_RANK, PlantedFault
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, Record, SeriesKey, Verdict, provenance_of
from pytest_mlhpc.store.store import read_records
from pytest_mlhpc.store.text import count, one_line, table, tell

#: Sizes of faults that are asked for without one, as shares of a step's time.
SIZES = {"slow-steps": 0.1, "slow-reading": 0.1, "slow-rank": 0.3}
#: pytest's exit codes of a session that ran: all passed, some failed; and ours where nothing but the infrastructure failed.
_PASSED, _FAILED, LATER = 0, 1, 75
#: `mlhpc alert send` runs so long after the session, in ns.
_AFTER_NS = 60 * 10**9
#: Lines of a session that could not begin, and of a message, that are shown.
_LINES, _FIRST = 15, 4
_CONTROL = "nothing"

#: Tells of a night: (state directory, configuration, time in ns UTC) -> the messages, as far as any channel takes them or not.
TellNight = Callable[[Path, Config, int], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class DrillRequest:
    """What is drilled: suites and their system, faults, how many nights, and where the site's own files lie."""

    suites: tuple[str, ...]
    system: str
    faults: tuple[PlantedFault, ...]
    nights: int
    config: Path | None
    systems_file: str | None
    baselines_dir: Path
    state_dir: Path


@dataclass(frozen=True)
class SentMessage:
    """A message of night *night*, and the channels that took it."""

    night: int
    message: Mapping[str, Any]
    channels: tuple[str, ...]

    @property
    def subjects(self) -> set[tuple[str, ...]]:
        """Whose state it tells: kind, partition, benchmark and node of each line of it, as far as that is bad."""
        lines = [one for one in self.message["problems"] if one["state"] != "resolved"]
        return {
            (self.message["kind"], one["partition"], one["benchmark"], one["node"])
            for one in (lines if self.message["state"] != "resolved" else [])
        }


@dataclass
class FaultNights:
    """What became of one fault, or of none: why its session did not run, its records by night, and what was announced."""

    name: str
    trouble: str = ""
    nights: list[list[Record]] = field(default_factory=list)
    sent: list[SentMessage] = field(default_factory=list)

    @property
    def planted(self) -> list[Record]:
        """The first attempts of the measured night that have the fault."""
        return [one for one in (self.nights or [[]])[0] if not one.attempt and " " in one.drill]

    @property
    def lost(self) -> dict[str, str]:
        """The tests of the measured night that the infrastructure lost, and why."""
        found = [one for one in (self.nights or [[]])[0] if one.verdict in INFRASTRUCTURE]
        return {one.node_id: one_line(one.failure, 200) for one in found if not one.attempt}

    def failing(self, number: int) -> set[str]:
        """Return the tests that failed in night *number*."""
        found = self.nights[number - 1] if number <= len(self.nights) else []
        return {one.node_id for one in found if not one.attempt and one.verdict in FAILURES}


def parse_faults(texts: Sequence[str]) -> tuple[PlantedFault, ...]:
    """Return the faults that *texts* are, each once; all kinds without any.

    Raises:
        UsageError: one of them is none.
    """
    return tuple(dict.fromkeys(map(parse_fault, texts or FAULTS)))


def parse_fault(text: str) -> PlantedFault:
    """Return the fault that ``slow-steps=10%`` is.

    Raises:
        UsageError: there is none of that name, or the size is none.
    """
    name, _, size = text.partition("=")
    if name not in FAULTS:
        raise UsageError(
            f"--fault {text!r} is no fault{did_you_mean(name, FAULTS)}; there are {', '.join(FAULTS)}"
        )
    if name not in DELAYS:
        if size:
            raise UsageError(f"--fault {text!r}: {name} has no size")
        return PlantedFault(name)
    try:
        share = float(size.removesuffix("%")) / (100 if size.endswith("%") else 1) if size else SIZES[name]
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise UsageError(f"--fault {text!r}: a size is a share of a step's time above 0, such as {name}=10%")
    return PlantedFault(name, share)


class _Drill:
    """One drill at work in its folder."""

    def __init__(
        self, request: DrillRequest, folder: DrillFolder, tell_night: TellNight, systems_file: Path | None
    ) -> None:
        self.request, self.folder, self._tell_night = request, folder, tell_night
        self.systems_file = systems_file
        self.provenance = provenance_of(Path.cwd())
        self.branch = self._config([]).branch or self.provenance.default_branch
        self.root = _project_root(request.suites)

    def run(self) -> Iterator[FaultNights]:
        """Run the night without a fault, then that of each fault; yield what became of each."""
        folder, request = self.folder, self.request
        system = request.system.partition(":")[0]
        drill.copy_state(request.state_dir, folder.template, system, self.branch)
        drill.copy_suites(self.root, _listed(self.root), folder.suites, request.state_dir)
        drill.copy_folder(request.baselines_dir, folder.path / "baselines")
        self._tell_night(folder.template, self._config([]), _now_ns())
        source = LocalSource(folder.template)
        try:
            self.later = LaterNights(source, self.branch)
        finally:
            source.close()
        control = self._one(_CONTROL, None)
        if control.trouble:
            yield control
            return
        yield control
        for fault in request.faults:
            yield self._missing(control) if fault.kind == MISSING_NIGHT else self._one(str(fault), fault)

    def _one(self, name: str, fault: PlantedFault | None) -> FaultNights:
        """Run a session with *fault*, and what follows it; then the nights after it."""
        tell(f"{name}: pytest {' '.join(self.request.suites)} --system {self.request.system}")
        found, state = FaultNights(name), self.folder.state(name, fault)
        began_ns = _now_ns()
        code, said = self._session(state)
        measured = [one for one in read_records(state) if one.drill]
        if code not in {_PASSED, _FAILED, LATER}:
            raise UsageError(f"the suites cannot be drilled: pytest ended with {code}:\n{said}")
        if not any(one.measurement or one.verdict in FAILURES for one in measured):
            why = one_line(measured[0].failure, 200) if measured else said.rpartition("\n")[2]
            found.trouble = f"nothing was measured: {why or 'no record was made'}"
            return found
        found.nights.append(measured)
        now_ns = max(began_ns, *(one.created_ns for one in measured)) + _AFTER_NS
        self._announce(found, state, now_ns)
        source = LocalSource(state)
        try:
            for number in range(2, self.request.nights + 1):
                found.nights.append(self.later.make(measured, number, state, source))
                self._announce(found, state, now_ns + (number - 1) * DAY_NS)
        finally:
            source.close()
        return found

    def _missing(self, control: FaultNights) -> FaultNights:
        """Tell of the nights after that without a fault, in which no session runs."""
        found, state = FaultNights(MISSING_NIGHT), self.folder.state(MISSING_NIGHT, None, self._after_control)
        last_ns = max(one.created_ns for one in control.nights[0])
        for number in range(1, self.request.nights + 1):
            found.nights.append([])
            self._announce(
                found, state, last_ns + self._config([]).stale_ns + (number - 1) * DAY_NS + _AFTER_NS
            )
        return found

    def _announce(self, found: FaultNights, state: Path, now_ns: int) -> None:
        """Run `mlhpc alert send --expect nightly` as if it were then; nothing is opened but the recording channels."""
        channels: list[RecordingChannel] = []
        plain = self._tell_night(state, self._config(channels), now_ns)
        for one in plain:
            ids = {channel.name: {message.id for message in channel.taken} for channel in channels}
            names = tuple(name for name, taken in ids.items() if one["id"] in taken)
            found.sent.append(SentMessage(len(found.nights), one, names))
        if found.name == _CONTROL and len(found.nights) == 1:
            self._after_control = self.folder.state("after", None, state)

    def _session(self, state: Path) -> tuple[int, str]:
        """Run pytest on the copy of the suites; return its exit code and the last lines that it printed.

        It gets neither the site's InfluxDB nor its state, and dies with this process; until then it holds the lock.
        """
        request, folder = self.request, self.folder
        ini = {
            "mlhpc_baselines_dir": folder.path / "baselines", "mlhpc_history": "local", "mlhpc_lease": "1m", "mlhpc_infra_exit_code": LATER,
            "mlhpc_systems_file": self.systems_file,
        }  # fmt: skip
        argv = [sys.executable, "-m", "pytest", *request.suites, f"--mlhpc-system={request.system}"]
        argv += [f"--mlhpc-state={state}", "-p", "no:cacheprovider"]
        argv += [word for name, value in ini.items() if value for word in ("-o", f"{name}={value}")]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("MLHPC_INFLUX")}
        environ |= {
            "MLHPC_PURPOSE": "nightly", "CI_COMMIT_BRANCH": self.branch, "CI_DEFAULT_BRANCH": self.branch,
            "CI_COMMIT_SHA": self.provenance.commit, "PYTHONDONTWRITEBYTECODE": "1", "MLHPC_STATE": str(state),
        }  # fmt: skip
        own = os.getpid()

        def end_with_drill() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has it ignored in the background
            die_with_parent(own, signal.SIGINT)  # by which a session cancels its jobs

        log = state.parent / "pytest.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                argv, cwd=folder.suites / Path.cwd().relative_to(self.root), env=environ, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, pass_fds=(folder.lock,), start_new_session=True,
                preexec_fn=end_with_drill,  # noqa: PLW1509 - this process has one thread
            )  # fmt: skip
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C; the session is signalled once, and cancels its jobs
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return code, clean("\n".join(lines[-_LINES:]))

    def _config(self, channels: list[RecordingChannel]) -> Config:
        """Return the site's configuration, with a recording channel in place of each of its own."""
        if self.request.config is None:
            return Config()
        from pytest_mlhpc.builtin import channel_types

        def record(name: str) -> RecordingChannel:
            channels.append(RecordingChannel(name))
            return channels[-1]

        return load(self.request.config, os.environ, channel_types(), record)


def _now_ns() -> int:
    return time.time_ns()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _project_root(suites: Sequence[str]) -> Path:
    """Return the folder that is copied: the checkout in which this one lies, else this one.

    Raises:
        UsageError: a suite is not there, or lies elsewhere.
    """
    top = _git("rev-parse", "--show-toplevel")
    root = Path(top.rstrip("\n")) if top else Path.cwd()
    for suite in suites:
        path = Path.cwd() / suite.partition("::")[0]
        if not path.exists():
            raise UsageError(
                f"{suite}: there is no such file or folder in {Path.cwd()}; name the suites that run at night"
            )
        if Path(suite).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
            raise UsageError(
                f"{suite}: name suites relative to this folder and below {root}, of which a copy is run"
            )
    return root


def _listed(root: Path) -> list[str] | None:
    """Return the files of a checkout that git knows or would add; None where *root* is none."""
    found = _git("-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return None if found is None else sorted({name for name in found.split("\0") if name})


def run_drill(request: DrillRequest, tell_night: TellNight) -> CommandReport:
    """Do it.

    Raises:
        UsageError: there is no such system or suite, or the suites cannot be run.
        MlhpcError: there is no room for the copy.
    """
    systems = options.chosen_systems(request.systems_file)
    targets = systems.select(request.system)
    roots = {run_root(one.partition, request.state_dir) for one in targets} - {request.state_dir}
    for line in reap_drills(request.state_dir):
        tell(line)
    with drill.drill_folder(request.state_dir, sorted(roots)) as folder:
        work = _Drill(
            request, folder, tell_night, None if systems.path == BUILT_IN else systems.path.resolve()
        )
        found = list(work.run())
        return DrillReport(request, work.later.figures, found).report()


@dataclass(frozen=True)
class DrillReport:
    """What is said of a drill: *figures* are those of each series in the site's history, *found* begins with the control."""

    request: DrillRequest
    figures: Mapping[SeriesKey, Sequence[float]]
    found: Sequence[FaultNights]

    def report(self) -> CommandReport:
        """Return table, messages and reasons; code 0: all was noticed, 1: something was not, 75: a session was lost."""
        control, *faults = self.found
        judged = [self._judged(one) for one in faults]
        rows: list[tuple[str, ...]] = [("fault", "planted in", "tests fail", "alert", "notified")]
        rows += [self._row(fault, one) for fault, one in zip(faults, judged, strict=True)]
        failing, sent = len(control.failing(1)), len(control.sent)
        without = ("not run", "-") if control.trouble else (str(failing), count(sent, "message"))
        rows.append((_CONTROL, "-", *without, "-"))
        parts = [table(rows), "\n", *self._messages(faults, judged), *self._reasons(judged)]
        lost = [(one.name, test, why) for one in self.found for test, why in one.lost.items()]
        lost += [(one.name, "", one.trouble) for one in self.found if one.trouble]
        parts += [
            f"{name}: {test or 'the session'} was lost: {why}; run the drill again\n"
            for name, test, why in lost
        ]
        missed = any(one["planted"] and not one["noticed"] for one in judged)
        data = {"system": self.request.system, "nights": self.request.nights, "faults": judged, "lost": [
            {"fault": name, "test": test, "why": why} for name, test, why in lost
        ], "without_fault": {
            "failed": sorted(control.failing(1)), "messages": [one.message["title"] for one in control.sent],
        }}  # fmt: skip
        return CommandReport("".join(parts), data, LATER if lost else int(missed))

    def _judged(self, one: FaultNights) -> dict[str, Any]:
        """Return who noticed a fault, and when; why not where a test with it did not fail."""
        control, planted = self.found[0], {record.node_id: record for record in one.planted}
        missing = one.name == MISSING_NIGHT and not one.trouble
        tests: dict[str, int] = {}
        alerts: list[SentMessage] = []
        for night in range(1, self.request.nights + 1):
            for test in sorted(one.failing(night) & planted.keys() - control.failing(night)):
                tests.setdefault(test, night)
            usual = {key for sent in control.sent if sent.night <= night for key in sent.subjects}
            alerts += [sent for sent in one.sent if sent.night == night and sent.subjects - usual]
        first = min([*tests.values(), *(sent.night for sent in alerts)], default=None)
        expected = {record.benchmark for record in control.nights[0]} if missing else set()
        return {
            "fault": one.name,
            "planted": sorted(expected if missing else planted),
            "noticed": first,
            "tests": tests,
            "alerts": [
                {
                    "night": sent.night, "kind": sent.message["kind"], "title": sent.message["title"],
                    "text": sent.message["text"], "owners": sent.message["owners"], "channels": sent.channels,
                }
                for sent in alerts
            ],
            "not_noticed": [self._why(record) for test, record in planted.items() if test not in {*tests, *one.lost}],
            "lost": one.trouble,
        }  # fmt: skip

    def _row(self, fault: FaultNights, judged: Mapping[str, Any]) -> tuple[str, ...]:
        if fault.trouble:
            return fault.name, "-", "not run", "-", "-"
        planted, tests, alerts = judged["planted"], judged["tests"], judged["alerts"]
        if not planted:
            return fault.name, "no test", "-", "-", "-"
        failing = f"{len(tests)}, {_when(min(tests.values()))}" if tests else "none"
        notified = sorted({name for one in alerts for name in one["channels"]}) or ["nobody"]
        alert = f"{alerts[0]['kind']}, {_when(alerts[0]['night'])}" if alerts else "none"
        return fault.name, count(len(planted), "test"), failing, alert, ", ".join(notified)

    def _messages(self, faults: Sequence[FaultNights], judged: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield each message: night, channels, owners, and how it begins."""
        for fault, one in zip(faults, judged, strict=True):
            for alert in one["alerts"]:
                channels = ", ".join(alert["channels"]) or "no channel takes it"
                owner = owners_text(alert["owners"]) or "nobody"
                yield f"{fault.name}, night {alert['night']}: {channels}; owner {owner}\n"
                # Without what to type next: commands would act on the drill's own incident.
                said = str(alert["text"]).partition("\nnext:")[0]
                lines = [line for line in said.splitlines() if line.strip()]
                yield "".join(f"  {clean(line)}\n" for line in lines[:_FIRST])

    def _reasons(self, judged: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for one in judged:
            yield from (f"{one['fault']}: {line}\n" for line in one["not_noticed"])
            if not one["planted"] and not one["lost"]:
                yield f"{one['fault']}: {_nowhere(one['fault'])}\n"
            elif one["fault"] == MISSING_NIGHT and not one["noticed"]:
                yield f"{MISSING_NIGHT}: a benchmark is expected once it was recorded in two nights; record more nights\n"

    def _why(self, record: Record) -> str:
        """Return why the test of a run with a fault did not fail."""
        name, verdict = record.node_id, record.verdict
        if verdict in FAILURES:
            return f"{name} fails without it, too: {verdict}"
        if verdict == Verdict.INCONCLUSIVE:
            return f"{name} is inconclusive: {one_line(' '.join(record.explanation), 200)}"
        nights = min(
            (len(self.figures.get(record.series(metric), ())) for metric in record.judged), default=0
        )
        if not record.judged:
            return f"{name} has no metric that is judged"
        if nights < ENOUGH + 1:
            missing = count(ENOUGH + 1 - nights, "night")
            return f"{name} passed: of {ENOUGH + 1} nights that the judge needs, {missing} are missing"
        lost = max(map(self._loss, [record] * len(record.judged), record.judged))
        return (
            f"{name} passed: it lost {lost:.1%}; `mlhpc history sensitivity` says how small a loss is found"
        )

    def _loss(self, record: Record, metric: str) -> float:
        """Return how much worse a run was than the nights of its series, a share of their median."""
        usual = statistics.median(self.figures[record.series(metric)])
        every = record.measurement.metrics if record.measurement else ()
        found = next((one for one in every if one.name == metric), None)
        if found is None or not usual:
            return 0.0
        return (1 if found.better == "lower" else -1) * (found.value / usual - 1)


def _when(night: int) -> str:
    return "the same night" if night == 1 else f"after {count(night - 1, 'night')}"


def _nowhere(fault: str) -> str:
    """Return why a fault could be planted into no test."""
    if fault.startswith(SLOW_RANK):
        return "no training of these suites has two ranks"
    return "no test of these suites trains in a loop whose steps can be slowed"
