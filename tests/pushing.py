"""A store that is pushed to a sink that does what servers do: refuse, be away, take half, die."""

from nights_of import store
from worlds import measurement, record

from pytest_mlhpc.history.events import Event, JournalEntry, add, append_journal
from pytest_mlhpc.influx.cursor import PushStart, read_start, restart
from pytest_mlhpc.influx.push import RefusedError, Sender, UnavailableError, push_records


class Server:
    """Keeps points by key and time, as InfluxDB does; takes the good lines of a request even if it refuses it."""

    def __init__(self, bad=lambda _line: False, limit=1 << 30):
        self.points: dict[str, str] = {}
        self.requests: list[list[str]] = []
        self.away: list[UnavailableError] = []
        self._bad, self._limit = bad, limit

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def write(self, lines):
        every = lines.decode().splitlines()
        self.requests.append(every)
        if self.away:
            raise self.away.pop(0)
        if len(lines) > self._limit:
            raise RefusedError(413, "request too large")
        for line in every:
            if not self._bad(line):
                point, moment = line.rsplit(" ", 1)
                key, value = point.replace("\\ ", "_").split(" ", 1)
                if key.startswith("mlhpc_event,"):  # of which the last one holds
                    self.points[f"{key} {moment}"] = value
                assert self.points.setdefault(f"{key} {moment}", value) == value
        if any(map(self._bad, every)):
            raise RefusedError(400, "partial write: field type conflict")

    @property
    def values(self):
        """The figures of the records that are there."""
        found = [value for key, value in self.points.items() if key.startswith("mlhpc_metric,")]
        return sorted(float(value.split(",")[0].removeprefix("value=")) for value in found)

    @property
    def events(self):
        """What the events say that are there, sorted, those that were removed with a mark."""
        found = [value for key, value in self.points.items() if key.startswith("mlhpc_event,")]
        return sorted(
            value.split(',text="')[1].split('"')[0] + " (removed)" * value.endswith("removed=true")
            for value in found
        )


class Failing(Server):
    """Raises what a function makes of a request, if that is an error."""

    def __init__(self, error_of):
        super().__init__()
        self._error_of = error_of

    def write(self, lines):
        if error := self._error_of(lines):
            raise error
        super().write(lines)


def measured(*numbers, **changes):
    """Return records whose figures are these numbers."""
    return [record(number, measurement=measurement(float(number)), **changes) for number in numbers]


def stored(state_dir, *numbers, session="s1", since_ns=0, **changes):
    """Store records, of which those since then are to be sent; return the path of their file."""
    store(state_dir, measured(*numbers, **changes), session)
    if not (state_dir / "influx/start.json").exists():
        restart(state_dir, since_ns)
    (path,) = state_dir.glob(f"records/*/{session}.jsonl")
    return path


def start(state_dir) -> PushStart:
    found = read_start(state_dir)
    assert found is not None
    return found


def push(server, state_dir, patience=None, *, lanes=1, tell=None):
    """Push what waits; return the sender and what was said."""
    said: list[str] = []
    sender = Sender(server, state_dir, patience, lanes=lanes)
    push_records(sender, start(state_dir), tell or said.append)
    return sender.progress, said


def floats(*numbers):
    return [float(number) for number in numbers]


AT_NS = 1_800_000_000_000_000_000


def noted(state_dir, number, text, **changes):
    """Note an event."""
    add(state_dir, Event(f"{number:08x}", "cirrus", text, AT_NS, **{"made_ns": AT_NS, **changes}))


def journaled(state_dir, *texts, at_ns=AT_NS):
    """Append entries to the journal."""
    kind = "alert_opened"
    append_journal(state_dir, [JournalEntry(f"regr-{text}", kind, "cirrus", text, at_ns) for text in texts])
