"""Following a log: every line once and in order, over cuts, rotation, long lines, and servers that are away."""

from __future__ import annotations

import queue
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_wire import Scripted, kubeconfig

from pytest_mlhpc.provision.kubernetes import errors, logs, pauses
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.kept_log import KeptLog
from pytest_mlhpc.provision.kubernetes.log_text import KNOWN_LINES, Recent, taken_apart, whole
from pytest_mlhpc.provision.kubernetes.logs import LogEnded, LogFollower, LogLine, LogTrouble
from pytest_mlhpc.provision.kubernetes.resources import POD, ObjectRef

REF = ObjectRef(POD, "mine", "p", "uid-p")
BEGAN = datetime(2026, 11, 21, 12, tzinfo=UTC)


def stamped(seconds: float, text: bytes) -> bytes:
    return (BEGAN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f789Z ").encode() + text


# Lines.


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"2026-11-21T12:00:00.123456789Z hello", b"hello"),
        (b"2026-11-21T12:00:00Z ", b""),
        (b"2026-11-21T13:00:00.5+01:00  two  spaces ", b" two  spaces "),
        (
            b"2026-11-21T12:00:00.1Z 2026-11-21T12:00:00.2Z said the program",
            b"2026-11-21T12:00:00.2Z said the program",
        ),
    ],
)
def test_a_line_has_its_time_and_its_text(line, text):
    assert taken_apart(line) == (int(BEGAN.timestamp()), text)


@pytest.mark.parametrize(
    "line", [b"", b"unable to retrieve container logs", b"2026-11-21 12:00:00 x", b"2026-11-21T12:00:00.1Z"]
)
def test_a_line_without_time_is_none_of_the_container(line):
    assert taken_apart(line) is None


def test_a_day_that_does_not_exist_does_no_harm():
    assert taken_apart(b"2026-02-31T12:00:00Z x") == (0, b"x")


@pytest.mark.parametrize("size", [16 * 1024, 8 * 1024])
@pytest.mark.parametrize("length", [100, 8191, 8192, 8193, 16384, 50_000, 16384 * 3])
def test_times_within_a_long_line_are_taken_out(size, length):
    text = bytes(32 + i % 90 for i in range(length))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    sent = b"".join(stamped(i / 1000, part) for i, part in enumerate(parts))
    assert taken_apart(sent) == (int(BEGAN.timestamp()), text)


def test_a_long_line_that_was_sent_whole_stays_as_it_is():
    text = b"x" * 40_000
    assert whole(text) == text
    assert whole(b"") == b""


# Knowing lines again.


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
    recent, delivered, since = Recent(), [], recent_since(Recent())
    for cut in [*sorted(cuts), len(lines)]:
        since = recent_since(recent)
        for line in lines[:cut]:
            second = taken_apart(line)[0]
            if second >= since and recent.is_new(second, line):
                delivered.append(line)
    assert delivered == lines
    assert not recent.hole


def recent_since(recent: Recent) -> float:
    asked = recent.resume()
    return datetime.fromisoformat(asked).timestamp() if asked else 0.0


def test_equal_lines_of_one_moment_are_as_many_as_they_were():
    line = stamped(1, b"same")
    recent = Recent()
    assert [recent.is_new(1, line) for _ in range(3)] == [True] * 3
    recent.resume()
    assert [recent.is_new(1, line) for _ in range(5)] == [False, False, False, True, True]


def test_lines_that_a_rotation_took_away_leave_a_hole():
    recent = Recent()
    for at in range(3):
        recent.is_new(at, stamped(at, b"old"))
    recent.resume()
    assert recent.is_new(3, stamped(3, b"new"))
    assert recent.hole


def test_a_rotation_whose_rest_still_has_the_last_line_leaves_no_hole():
    recent = Recent()
    for at in range(3):
        recent.is_new(at, stamped(at, b"old"))
    recent.resume()
    assert not recent.is_new(2, stamped(2, b"old"))
    assert recent.is_new(2, stamped(2.5, b"new"))
    assert not recent.hole


@pytest.mark.parametrize(
    ("length", "silence_s", "hole"),
    [(300_000, 3, True), (300_000, 2, False), (200_000, 3600, False)],
    ids=["long", "no time for a rotation", "nothing to rotate"],
)
def test_a_silence_in_a_long_log_may_be_a_file_that_a_kubelet_passed_over(length, silence_s, hole):
    recent = Recent()
    for at in range(length // 1000):
        recent.is_new(0, stamped(at / 1000, b"x" * 1000))
    recent.is_new(silence_s, stamped(silence_s, b"x"))
    assert recent.hole == hole


def test_memory_is_of_the_last_lines_alone():
    recent = Recent()
    for at in range(3 * KNOWN_LINES):
        recent.is_new(at // 10, stamped(at / 10, b"x"))
    assert KNOWN_LINES / 2 < sum(map(len, recent._lines.values())) < 1.1 * KNOWN_LINES


def test_lines_that_a_kubelet_reads_again_in_one_stream_come_once():
    lines = [b"2026-11-21T12:00:%02d.123456789Z %d" % (at // 10, at) for at in range(300)]
    lines = [line.replace(b".123456789", b".12345%04d" % at) for at, line in enumerate(lines)]
    recent = Recent()
    sent = [*lines[:120], *lines[40:130], *lines[40:]]
    came = [line for line in sent if recent.is_new(taken_apart(line)[0], line)]
    assert came == lines
    assert not recent.hole


def test_equal_lines_of_a_clock_that_tells_no_nanoseconds_are_kept():
    recent = Recent()
    assert [recent.is_new(1, b"2026-11-21T12:00:01.123Z x") for _ in range(3)] == [True] * 3


# The file.


def test_the_text_is_kept_up_to_the_cap_and_the_rest_counted(tmp_path):
    kept = KeptLog(tmp_path / "pods" / "p.log", 10)
    for line in (b"1234", b"5678", b"", b"90"):
        kept.write(line)
    kept.close()
    assert (tmp_path / "pods" / "p.log").read_bytes() == b"1234\n5678\n[4 bytes more were not kept]\n"
    assert kept.trouble == ""


def test_a_file_that_cannot_be_made_is_told_and_harms_nothing(tmp_path):
    (tmp_path / "pods").write_text("a file")
    kept = KeptLog(tmp_path / "pods" / "p.log", 10)
    kept.write(b"x")
    kept.close()
    assert "p.log cannot be written: " in kept.trouble


def test_a_full_disk_is_told():
    from pathlib import Path

    kept = KeptLog(Path("/dev/full"), 100)
    kept.write(b"x")
    kept.close()
    assert kept.trouble == "/dev/full cannot be written: No space left on device"


def test_no_link_is_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "p.log").symlink_to(tmp_path / "target")
    kept = KeptLog(tmp_path / "p.log", 100)
    kept.write(b"x")
    kept.close()
    assert kept.trouble
    assert (tmp_path / "target").read_text() == "precious"


# Following.


class Kubelet:
    """Serves a log as API server and kubelet do: whole seconds of sinceTime, a proper end once the container has ended."""

    def __init__(self, lines=(), *, over=False):
        self.lines = list(lines)
        self.over = over
        self.state = "running"
        self.cuts = []  #: after how many lines to cut a stream, one for each stream
        self.first = []  #: what to do with a request instead, one for each
        self.changed = threading.Condition()
        self.follows = 0

    def __call__(self, asked):
        if self.first and (step := self.first.pop(0)) is not None:
            step(asked)
        elif asked.path.endswith("/log"):
            self.log(asked)
        else:
            state = {"terminated": {"exitCode": 0}} if self.state == "terminated" else {"running": {}}
            asked.answer(
                {"status": {"phase": "Running", "containerStatuses": [{"name": "main", "state": state}]}}
            )

    def log(self, asked):
        since = (
            datetime.fromisoformat(asked.query["sinceTime"]).timestamp() if "sinceTime" in asked.query else 0
        )
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
                if taken_apart(line) is not None and taken_apart(line)[0] < since:
                    continue
                if cut is not None and sent == cut:
                    asked.piece(line[: len(line) // 2])  # in the middle of a line
                    asked.connection.close()
                    return
                asked.piece(line + b"\n")
                sent += 1
            if self.over or not follow:
                asked.end()
                return

    def say(self, *lines):
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def close(self):
        """Let go of streams that wait for more."""
        self.over = True

    def end(self):
        with self.changed:
            self.over, self.state = True, "terminated"
            self.changed.notify_all()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(pauses, "FIRST_S", 0.02)
    monkeypatch.setattr(pauses, "MOST_S", 0.1)
    monkeypatch.setattr(pauses, "REFUSED_S", 0.1)
    monkeypatch.setattr(logs, "STATUS_S", 0.1)
    monkeypatch.setattr(logs, "LAST_LOOK_S", 2.0)


@pytest.fixture
def follow(tmp_path):
    made = []

    def go(kubelet, **more):
        server = Scripted(kubelet)
        api = connect(
            kubeconfig=str(kubeconfig(tmp_path / "k", f"http://127.0.0.1:{server.port}")), environ={}
        )
        reports = queue.SimpleQueue()
        follower = LogFollower(api, REF, "main", reports.put, keep=tmp_path / "pods" / "p.log", **more)
        made.extend([follower, api, kubelet, server])
        follower.start()
        return follower, reports, server

    yield go
    for one in made:
        one.close()


def all_of(reports):
    """The lines, what troubles there were, and the end."""
    lines, troubles = [], []
    while not isinstance(report := reports.get(timeout=20), LogEnded):
        if isinstance(report, LogLine):
            assert (report.ref, report.container) == (REF, "main")
            lines.append(report.line)
        else:
            assert isinstance(report, LogTrouble)
            troubles.append(report)
    return lines, troubles, report


def numbered(count, per_second=1000):
    return [stamped(i / per_second, b"line %d" % i) for i in range(count)]


TEXTS = [b"line %d" % i for i in range(5000)]


def test_a_log_is_told_live_and_kept(follow, tmp_path):
    kubelet = Kubelet(numbered(2))
    follower, reports, _ = follow(kubelet)
    assert [reports.get(timeout=20).line for _ in range(2)] == TEXTS[:2]
    kubelet.say(stamped(1, b""), stamped(2, b"third"))
    assert [reports.get(timeout=20).line for _ in range(2)] == [b"", b"third"]
    assert (tmp_path / "pods/p.log").read_bytes() == b"line 0\nline 1\n\nthird\n"
    kubelet.end()
    assert all_of(reports) == ([], [], LogEnded(REF, "main", complete=True))
    follower.close()


def test_a_log_that_is_cut_again_and_again_comes_once_and_in_order(follow, tmp_path):
    kubelet = Kubelet(numbered(5000), over=True)
    kubelet.cuts = [10, 1500, 0, 3999]
    kubelet.state = "terminated"
    _, reports, _ = follow(kubelet)
    lines, _, end = all_of(reports)
    assert lines == TEXTS
    assert end.complete
    assert (tmp_path / "pods/p.log").read_bytes() == b"".join(line + b"\n" for line in TEXTS)
    assert kubelet.follows == 5


def test_a_container_that_is_said_to_have_ended_is_not_asked_about(follow):
    kubelet = Kubelet(numbered(3), over=True)
    follower, reports, server = follow(kubelet)
    follower.ended()
    lines, _, end = all_of(reports)
    assert (lines, end.complete) == (TEXTS[:3], True)
    assert all(asked.path.endswith("/log") for asked in server.asked)


def test_what_a_server_left_out_at_its_proper_end_is_found_by_the_last_look(follow):
    """The kubelet died, the API server ended the log as if that were all, and the container went on for a while."""
    kubelet = Kubelet(numbered(3), over=True)
    _, reports, _ = follow(kubelet)
    assert [reports.get(timeout=20).line for _ in range(3)] == TEXTS[:3]
    kubelet.say(stamped(5, b"later"))
    kubelet.state = "terminated"
    lines, _, end = all_of(reports)
    assert (lines, end.complete) == ([b"later"], True)


def test_a_log_that_ended_while_its_container_runs_is_followed_again(follow):
    kubelet = Kubelet(numbered(3), over=True)
    _, reports, _ = follow(kubelet)
    assert [reports.get(timeout=20).line for _ in range(3)] == TEXTS[:3]
    while kubelet.follows < 3:
        time.sleep(0.01)
    kubelet.over = False
    kubelet.say(stamped(9, b"alive"))
    assert reports.get(timeout=20).line == b"alive"
    kubelet.end()
    assert all_of(reports)[2].complete


@pytest.mark.parametrize("proper", [True, False])
def test_a_pod_that_vanishes_ends_the_log(follow, proper):
    kubelet = Kubelet(numbered(3), over=True)
    kubelet.cuts = [] if proper else [2]
    kubelet.first = [None, *[lambda asked: asked.refuse(404, 'pods "p" not found')] * 9]
    _, reports, _ = follow(kubelet)
    lines, _, end = all_of(reports)
    assert lines == TEXTS[: 3 if proper else 2]
    assert end.complete is proper
    assert end.error is None if proper else isinstance(end.error, errors.NotFound)


def test_a_rotated_log_is_told_as_not_complete(follow):
    kubelet = Kubelet(numbered(3))
    _, reports, server = follow(kubelet)
    assert [reports.get(timeout=20).line for _ in range(3)] == TEXTS[:3]
    with kubelet.changed:
        kubelet.lines[:] = [stamped(1, b"after the rotation")]
    server.cut()
    assert reports.get(timeout=20).line == b"after the rotation"
    kubelet.end()
    _, _, end = all_of(reports)
    assert not end.complete


@pytest.mark.parametrize("status", [403, 401, 500])
def test_a_refusal_is_told_at_once_or_soon_and_tried_again(follow, status):
    kubelet = Kubelet(numbered(3), over=True)
    kubelet.state = "terminated"
    kubelet.first = [lambda asked: asked.refuse(status, "no")] * 4
    _, reports, _ = follow(kubelet)
    lines, troubles, end = all_of(reports)
    assert (lines, end.complete) == (TEXTS[:3], True)
    assert troubles[0].error.status == status
    assert "cannot get pods/log" in str(troubles[0].error)
    assert len({trouble.since for trouble in troubles}) == 1


def test_a_log_that_may_not_be_read_in_the_end_is_told(follow):
    kubelet = Kubelet()
    kubelet.first = [lambda asked: asked.refuse(403, "User x cannot get resource pods/log")] * 99
    follower, reports, _ = follow(kubelet)
    follower.ended()
    lines, _, end = all_of(reports)
    assert (lines, end.complete) == ([], False)
    assert isinstance(end.error, errors.Forbidden)


def test_a_container_that_is_not_there_yet_is_waited_for(follow):
    kubelet = Kubelet(numbered(1), over=True)
    kubelet.state = "terminated"
    waiting = 'container "main" in pod "p" is waiting to start: ContainerCreating'
    kubelet.first = [lambda asked: asked.refuse(400, waiting)] * 3
    _, reports, _ = follow(kubelet)
    assert all_of(reports)[0] == TEXTS[:1]


def test_a_container_that_does_not_exist_ends_it(follow):
    kubelet = Kubelet()
    kubelet.first = [lambda asked: asked.refuse(400, "container main is not valid for pod p")]
    _, reports, _ = follow(kubelet)
    _, _, end = all_of(reports)
    assert isinstance(end.error, errors.Invalid)
    assert not end.complete


def test_what_the_kubelet_says_instead_of_a_log_is_no_line(follow):
    words = b"unable to retrieve container logs for containerd://12ab"
    kubelet = Kubelet([words], over=True)
    kubelet.state = "terminated"
    _, reports, _ = follow(kubelet)
    lines, _, end = all_of(reports)
    assert (lines, end.complete) == ([], False)
    assert words.decode() in str(end.error)


def test_a_last_line_without_newline_is_told(follow):
    def unended(asked):
        asked.begin()
        asked.piece(stamped(1, b"whole") + b"\n" + stamped(1, b"half"))
        asked.end()

    kubelet = Kubelet()
    kubelet.state = "terminated"
    kubelet.first = [unended, None, unended]
    _, reports, _ = follow(kubelet)
    lines, _, end = all_of(reports)
    assert (lines, end.complete) == ([b"whole", b"half"], True)


def test_a_server_that_is_away_at_the_last_look_is_waited_for_but_not_for_ever(follow, monkeypatch):
    monkeypatch.setattr(logs, "LAST_LOOK_S", 0.2)
    kubelet = Kubelet(numbered(1), over=True)
    kubelet.first = [None, *[lambda asked: asked.refuse(503, "away")] * 99]
    follower, reports, _ = follow(kubelet)
    follower.ended()
    lines, troubles, end = all_of(reports)
    assert lines == TEXTS[:1]
    assert isinstance(end.error, errors.Unavailable)
    assert troubles


@pytest.mark.parametrize("where", ["stream", "open", "pause"])
def test_closing_does_not_wait(follow, where):
    arrived = threading.Event()

    def hang(asked):
        if where == "stream":
            asked.begin()
        if where == "pause":
            asked.refuse(403, "no")
        arrived.set()
        asked.hang()

    kubelet = Kubelet()
    kubelet.first = [hang]
    follower, reports, _ = follow(kubelet)
    assert arrived.wait(20)
    follower.close()
    follower.close()
    while not reports.empty():
        assert isinstance(reports.get(), LogTrouble)
