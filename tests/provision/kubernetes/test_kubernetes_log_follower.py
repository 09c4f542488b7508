"""Following a log: each line once and in order, across cuts, rotation, long lines and outages."""

import contextlib
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_allocations import HANG_S, wait_until

from pytest_mlhpc.provision.kubernetes import errors, log_follower
from pytest_mlhpc.provision.kubernetes.log_follower import (
    REMEMBERED_LINES,
    LogEnded,
    LogFailing,
    LogFollower,
    LogLine,
    RecentLines,
    join_fragments,
    split_time,
)
from pytest_mlhpc.provision.kubernetes.log_parser import LineLog
from pytest_mlhpc.provision.kubernetes.objects import POD, ObjectRef

REF = ObjectRef(POD, "mine", "p", "uid-p")
BEGAN = datetime(2026, 11, 21, 12, tzinfo=UTC)


def stamped(seconds, text):
    return (BEGAN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f789Z ").encode() + text


# --- lines


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"2026-11-21T12:00:00.123456789Z hello", b"hello"),
        (b"2026-11-21T12:00:00Z ", b""),
        (b"2026-11-21T13:00:00.5+01:00  two  spaces ", b" two  spaces "),
        (b"2026-11-21T12:00:00.1Z 2026-11-21T12:00:00.2Z said the program", b"2026-11-21T12:00:00.2Z said the program"),
    ],
)  # fmt: skip
def test_a_line_has_its_time_and_its_text(line, text):
    assert split_time(line) == (int(BEGAN.timestamp()), text)


@pytest.mark.parametrize(
    "line", [b"", b"unable to retrieve container logs", b"2026-11-21 12:00:00 x", b"2026-11-21T12:00:00.1Z"]
)
def test_a_line_without_time_is_none_of_the_container(line):
    assert split_time(line) is None


def test_a_day_that_does_not_exist_does_no_harm():
    assert split_time(b"2026-02-31T12:00:00Z x") == (0, b"x")


@pytest.mark.parametrize("size", [16 * 1024, 8 * 1024])
@pytest.mark.parametrize("length", [100, 8191, 8192, 8193, 16384, 50_000, 16384 * 3])
def test_times_within_a_long_line_are_taken_out(size, length):
    text = bytes(32 + i % 90 for i in range(length))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    sent = b"".join(stamped(i / 1000, part) for i, part in enumerate(parts))
    assert split_time(sent) == (int(BEGAN.timestamp()), text)


@pytest.mark.parametrize("text", [b"x" * 40_000, b""])
def test_a_line_that_was_sent_whole_stays_as_it_is(text):
    assert join_fragments(text) == text


# --- knowing lines again


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([b"a", b"b", b"c"])), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.integers(-1000, 1000),
)
def test_every_line_comes_once_however_often_the_log_is_cut(steps, cuts, jitter):
    """Times go on by 0 to 3 s, and every other line is up to a second early or late, as of a second stream."""
    at, lines = 10.0, []
    for number, (step, text) in enumerate(steps):
        at += step / 1000
        line = stamped(at + (jitter / 1000 if number % 2 else 0), text)
        if line not in lines[:-1]:  # only lines that follow each other share a moment
            lines.append(line)
    recent, delivered = RecentLines(), []
    for cut in [*sorted(cuts), len(lines)]:
        asked = recent.resume()
        since = datetime.fromisoformat(asked).timestamp() if asked else 0.0
        for line in lines[:cut]:
            second = split_time(line)[0]
            if second >= since and recent.is_new(second, line):
                delivered.append(line)
    assert delivered == lines
    assert not recent.gap


def test_equal_lines_of_one_moment_are_as_many_as_they_were():
    line, recent = stamped(1, b"same"), RecentLines()
    assert [recent.is_new(1, line) for _ in range(3)] == [True] * 3
    recent.resume()
    assert [recent.is_new(1, line) for _ in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("then", "new", "hole"),
    [
        pytest.param([(3, b"new")], [True], True, id="that a rotation took away"),
        pytest.param(
            [(2, b"old"), (2.5, b"new")], [False, True], False, id="of which the rest still has the last one"
        ),
    ],
)
def test_lines_that_are_missed_leave_a_hole(then, new, hole):
    recent = RecentLines()
    for at in range(3):
        recent.is_new(at, stamped(at, b"old"))
    recent.resume()
    assert [recent.is_new(int(at), stamped(at, text)) for at, text in then] == new
    assert recent.gap is hole


@pytest.mark.parametrize(
    ("length", "silence_s", "hole"),
    [(300_000, 3, True), (300_000, 2, False), (200_000, 3600, False)],
    ids=["long", "no time for a rotation", "nothing to rotate"],
)
def test_a_silence_in_a_long_log_may_be_a_file_that_a_kubelet_passed_over(length, silence_s, hole):
    recent = RecentLines()
    for at in range(length // 1000):
        recent.is_new(0, stamped(at / 1000, b"x" * 1000))
    recent.is_new(silence_s, stamped(silence_s, b"x"))
    assert recent.gap == hole


def test_memory_is_of_the_last_lines_alone():
    recent = RecentLines()
    for at in range(2 * REMEMBERED_LINES):
        recent.is_new(at // 10, b"%d" % at)
    assert REMEMBERED_LINES / 2 < sum(map(len, recent._lines.values())) < 1.1 * REMEMBERED_LINES


def test_lines_that_a_kubelet_reads_again_in_one_stream_come_once():
    lines = [b"2026-11-21T12:00:%02d.12345%04dZ %d" % (at // 10, at, at) for at in range(300)]
    recent = RecentLines()
    sent = [*lines[:120], *lines[40:130], *lines[40:]]
    assert [line for line in sent if recent.is_new(split_time(line)[0], line)] == lines
    assert not recent.gap


def test_equal_lines_of_a_clock_without_nanoseconds_are_not_dropped():
    recent = RecentLines()
    assert [recent.is_new(1, b"2026-11-21T12:00:01.123Z x") for _ in range(3)] == [True] * 3


# --- the file


def problem_of(path, *lines, cap=100):
    """Write lines to a file; return what went wrong."""
    with contextlib.closing(LineLog(path, cap)) as log:
        for line in lines:
            log.write(line)
    return log.problem


def test_a_pod_log_is_written_up_to_the_cap_and_the_rest_counted(tmp_path):
    path = tmp_path / "pods" / "p.log"
    assert problem_of(path, b"1234", b"5678", b"", b"90", cap=10) == ""
    assert path.read_bytes() == b"1234\n5678\n\n[4 more bytes were dropped]\n"


def test_a_file_that_cannot_be_created_is_reported_and_harms_nothing(tmp_path):
    (tmp_path / "pods").write_text("a file")
    assert "p.log cannot be written: " in problem_of(tmp_path / "pods" / "p.log", b"x")


def test_a_full_disk_is_reported():
    assert problem_of(Path("/dev/full"), b"x") == "/dev/full cannot be written: No space left on device"


def test_no_link_is_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "p.log").symlink_to(tmp_path / "target")
    assert problem_of(tmp_path / "p.log", b"x")
    assert (tmp_path / "target").read_text() == "precious"


# --- following


class Kubelet:
    """Serves a log as API server and kubelet do: whole seconds of sinceTime, a proper end once the container has ended."""

    def __init__(self, lines=(), *, over=False, state="running", cuts=(), first=()):
        self.lines = list(lines)
        self.over = over  #: the log ends after its lines
        self.state = state
        self.cuts = list(cuts)  #: after how many lines to cut a stream, one for each stream
        self.first = list(first)  #: what to do with a request instead, one for each
        self.changed = threading.Condition()
        self.follows = 0

    def __call__(self, asked):
        if self.first and (step := self.first.pop(0)) is not None:
            step(asked)
        elif asked.path.endswith("/log"):
            self.log(asked)
        else:
            self.status(asked)

    def status(self, asked):
        state = {"terminated": {"exitCode": 0}} if self.state == "terminated" else {"running": {}}
        containers = [{"name": "main", "state": state}]
        asked.answer({"status": {"phase": "Running", "containerStatuses": containers}})

    def log(self, asked):
        since = datetime.fromisoformat(asked.query.get("sinceTime", "1970-01-01T00:00:00Z")).timestamp()
        follow = asked.query["follow"] == "true"
        self.follows += follow
        cut = self.cuts.pop(0) if self.cuts else None
        asked.begin()
        sent = at = 0
        while True:
            with self.changed:
                while at >= len(self.lines) and not self.over and follow:
                    self.changed.wait(0.05)
                fresh, at = self.lines[at:], len(self.lines)
            for line in fresh:
                if split_time(line) is not None and split_time(line)[0] < since:
                    continue
                if sent == cut:
                    asked.piece(line[: len(line) // 2])  # in the middle of a line
                    asked.connection.close()
                    return
                asked.piece(line + b"\n")
                sent += 1
            if self.over or not follow:
                asked.end()
                return

    def print(self, *lines):
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def close(self):
        """End the streams that wait for more."""
        self.over = True

    def end(self):
        """End the container."""
        self.state = "terminated"
        self.close()


@pytest.fixture
def follow(reach, closing, reports, tmp_path, short_pauses):
    """Follow a log of this kubelet; return the follower and the server."""

    def go(kubelet):
        api, server = reach(kubelet)
        closing(kubelet)
        path = tmp_path / "pods" / "p.log"
        follower = closing(LogFollower(api, REF, "main", reports.put, path=path))
        follower.start()
        return follower, server

    return go


@pytest.fixture
def all_of(reports):
    """Return the lines that come, what troubles there were, and the end."""

    def read():
        found = {LogLine: [], LogFailing: []}
        while not isinstance(report := reports.next(), LogEnded):
            found[type(report)].append(report)
        assert {(one.ref, one.container) for one in found[LogLine]} <= {(REF, "main")}
        return [one.line for one in found[LogLine]], found[LogFailing], report

    return read


@pytest.fixture
def lines_of(reports):
    return lambda number: [report.line for report in reports.next(number)]


TEXTS = [b"line %d" % i for i in range(1000)]
LINES = [stamped(i / 200, text) for i, text in enumerate(TEXTS)]


def refusal(status, text="no"):
    return lambda asked: asked.refuse(status, text)


def unended(asked):
    """Answer with a log whose last line has no newline yet."""
    asked.begin()
    asked.piece(stamped(1, b"whole") + b"\n" + stamped(1, b"half"))
    asked.end()


def test_a_log_is_reported_live_and_written(follow, lines_of, all_of, tmp_path):
    kubelet = Kubelet(LINES[:2])
    follow(kubelet)
    assert lines_of(2) == TEXTS[:2]
    kubelet.print(stamped(1, b""), stamped(2, b"third"))
    assert lines_of(2) == [b"", b"third"]
    assert (tmp_path / "pods/p.log").read_bytes() == b"line 0\nline 1\n\nthird\n"
    kubelet.end()
    assert all_of() == ([], [], LogEnded(REF, "main", complete=True))


def test_a_log_that_is_cut_again_and_again_comes_once_and_in_order(follow, all_of, tmp_path):
    kubelet = Kubelet(LINES, over=True, state="terminated", cuts=[10, 300, 0, 799])
    follow(kubelet)
    lines, _, end = all_of()
    assert (lines, end.complete, kubelet.follows) == (TEXTS, True, 5)
    assert (tmp_path / "pods/p.log").read_bytes() == b"".join(line + b"\n" for line in TEXTS)


GONE = refusal(404, 'pods "p" not found')
WAITING = refusal(400, 'container "main" in pod "p" is waiting to start: ContainerCreating')
NO_LOG = b"unable to retrieve container logs for containerd://12ab"


@pytest.mark.parametrize(
    ("kubelet", "lines", "error"),
    [
        pytest.param({"lines": LINES[:3], "over": True, "first": [None, *[GONE] * 9]}, TEXTS[:3], None, id="a pod that vanishes"),
        pytest.param(
            {"lines": LINES[:3], "over": True, "cuts": [2], "first": [None, *[GONE] * 9]}, TEXTS[:2], errors.NotFound,
            id="a pod that vanishes with the connection",
        ),
        pytest.param(
            {"lines": LINES[:1], "over": True, "state": "terminated", "first": [WAITING] * 3}, TEXTS[:1], None,
            id="a container that is not there yet is waited for",
        ),
        pytest.param(
            {"first": [refusal(400, "container main is not valid for pod p")]}, [], errors.Invalid,
            id="a container that does not exist",
        ),
        pytest.param(
            {"lines": [NO_LOG], "over": True, "state": "terminated"}, [], errors.KubernetesError,
            id="what the kubelet says instead of a log is no line",
        ),
        pytest.param(
            {"state": "terminated", "first": [unended, None, unended]}, [b"whole", b"half"], None,
            id="a last line without newline",
        ),
    ],
)  # fmt: skip
def test_a_log_ends(follow, all_of, kubelet, lines, error):
    follow(Kubelet(**kubelet))
    found, _, end = all_of()
    assert (found, end.complete) == (lines, error is None)
    assert type(end.error) is (error or type(None))
    assert NO_LOG not in kubelet.get("lines", ()) or NO_LOG.decode() in str(end.error)


def test_a_container_that_is_known_to_have_ended_is_not_read_again(follow, lines_of, all_of):
    kubelet = Kubelet(LINES[:3])
    follower, server = follow(kubelet)
    assert lines_of(3) == TEXTS[:3]
    follower.ended()
    kubelet.close()
    assert all_of() == ([], [], LogEnded(REF, "main", complete=True))
    assert all(asked.path.endswith("/log") for asked in server.asked)


def test_what_a_server_left_out_at_its_proper_end_is_found_by_the_last_look(follow, all_of):
    """The kubelet died, the API server ended the log as if that were all, and the container went on for a while."""
    kubelet = Kubelet(LINES[:3], over=True)

    def ended_since(asked):
        kubelet.print(stamped(5, b"later"))
        kubelet.end()
        kubelet.status(asked)

    kubelet.first = [None, ended_since]
    follow(kubelet)
    lines, _, end = all_of()
    assert (lines, end.complete) == ([*TEXTS[:3], b"later"], True)


def test_a_kubelet_that_has_just_started_and_does_not_know_its_pods_costs_no_line(follow, all_of):
    """It has died, the API server ended the log as if that were all, and the container ended before the kubelet was back."""
    kubelet = Kubelet(LINES[:3], over=True)

    def unknown(asked):
        kubelet.print(stamped(5, b"later"))
        kubelet.end()
        asked.refuse(404, "pod p does not exist")

    kubelet.first = [None, None, unknown]
    follow(kubelet)
    lines, _, end = all_of()
    assert (lines, end.complete) == ([*TEXTS[:3], b"later"], True)


def test_a_log_that_ended_while_its_container_runs_is_followed_again(follow, lines_of, all_of):
    kubelet = Kubelet(LINES[:3], over=True)
    follow(kubelet)
    assert lines_of(3) == TEXTS[:3]
    wait_until(lambda: kubelet.follows >= 3)
    kubelet.over = False
    kubelet.print(stamped(9, b"alive"))
    assert lines_of(1) == [b"alive"]
    kubelet.end()
    assert all_of()[2].complete


def test_a_log_goes_on_though_the_status_could_not_be_asked_for_once(follow, lines_of, all_of):
    kubelet = Kubelet(LINES[:3], over=True, first=[None, refusal(500)])
    follow(kubelet)
    assert lines_of(3) == TEXTS[:3]
    wait_until(lambda: kubelet.follows >= 2)
    kubelet.over = False
    kubelet.print(stamped(9, b"alive"))
    assert lines_of(1) == [b"alive"]
    kubelet.end()
    assert all_of()[2].complete


def test_a_rotated_log_is_reported_as_incomplete(follow, lines_of, all_of):
    kubelet = Kubelet(LINES[:3])
    _, server = follow(kubelet)
    assert lines_of(3) == TEXTS[:3]
    with kubelet.changed:
        kubelet.lines[:] = [stamped(1, b"after the rotation")]
    server.cut()
    assert lines_of(1) == [b"after the rotation"]
    kubelet.end()
    assert not all_of()[2].complete


@pytest.mark.parametrize("status", [403, 401, 500])
def test_a_refusal_is_reported_at_once_or_soon_and_retried(follow, all_of, status):
    follow(Kubelet(LINES[:3], over=True, state="terminated", first=[refusal(status)] * 4))
    lines, troubles, end = all_of()
    assert (lines, end.complete) == (TEXTS[:3], True)
    assert (troubles[0].error.status, "cannot get pods/log" in str(troubles[0].error)) == (status, True)
    assert len({trouble.since for trouble in troubles}) == 1


def test_a_log_that_cannot_be_read_in_the_end_is_reported(follow, all_of):
    follower, _ = follow(Kubelet(first=[refusal(403, "User x cannot get resource pods/log")] * 99))
    follower.ended()
    lines, _, end = all_of()
    assert (lines, end.complete, type(end.error)) == ([], False, errors.Forbidden)


def test_a_server_that_is_away_at_the_last_look_is_waited_for_but_not_for_ever(
    follow, lines_of, all_of, monkeypatch
):
    monkeypatch.setattr(log_follower, "LAST_READ_S", 0.2)
    kubelet = Kubelet(LINES[:1], first=[None, *[refusal(503, "away")] * 99])
    follower, _ = follow(kubelet)
    assert lines_of(1) == TEXTS[:1]
    follower.ended()
    kubelet.close()
    lines, troubles, end = all_of()
    assert (lines, type(end.error)) == ([], errors.Unavailable)
    assert troubles


@pytest.mark.parametrize("where", ["stream", "open", "pause"])
def test_closing_does_not_wait(follow, reports, where):
    arrived = threading.Event()

    def hang(asked):
        if where == "stream":
            asked.begin()
        if where == "pause":
            asked.refuse(403, "no")
        arrived.set()
        asked.hang()

    follower, _ = follow(Kubelet(first=[hang]))
    assert arrived.wait(HANG_S)
    follower.close()
    follower.close()
    assert all(isinstance(report, LogFailing) for report in reports.rest())
