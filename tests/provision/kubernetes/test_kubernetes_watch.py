"""Following a kind: what is told, from where it goes on, and how often a server is asked that is away."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from kubernetes_wire import Scripted, kubeconfig

from pytest_mlhpc.provision.kubernetes import errors, pauses
from pytest_mlhpc.provision.kubernetes import watch as watching
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import Call
from pytest_mlhpc.provision.kubernetes.resources import POD, ObjectRef
from pytest_mlhpc.provision.kubernetes.watch import Healed, Seen, Synced, Trouble, Vanished, Watcher


def pod(name, version, uid=""):
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "mine",
            "uid": uid or f"uid-{name}",
            "resourceVersion": version,
        },
    }


class Script:
    """Answers lists and watches one after the other; the last of each kind is repeated."""

    def __init__(self, lists, watches):
        self.lists, self.watches = list(lists), list(watches)
        self.times = []

    def __call__(self, asked):
        self.times.append(time.monotonic())
        steps = self.watches if asked.query.get("watch") else self.lists
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        step(asked)


def listing(*items, version):
    def step(asked):
        asked.answer({"kind": "PodList", "metadata": {"resourceVersion": version}, "items": list(items)})

    return step


def events(*told, then="hang"):
    def step(asked):
        asked.begin()
        for kind, content in told:
            asked.event(kind, content)
        if then == "hang":
            asked.hang()
        elif then == "end":
            asked.end()
        else:
            asked.connection.close()

    return step


def refusal(status, message="no", **headers):
    return lambda asked: asked.refuse(status, message, **headers)


GONE = ("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version", "reason": "Expired"})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    for module in (pauses, watching):
        monkeypatch.setattr(module, "FIRST_S", 0.02)
    monkeypatch.setattr(pauses, "MOST_S", 0.1)
    monkeypatch.setattr(pauses, "REFUSED_S", 0.1)


@pytest.fixture
def follow(tmp_path):
    """Start a watcher of a server with this script; return the server and what `next` report comes."""
    made = []

    def go(*script):
        server = script[0] if isinstance(script[0], Scripted) else Scripted(Script(*script))
        path = kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.port}")
        api = connect(kubeconfig=str(path), environ={})
        reports = queue.SimpleQueue()
        watcher = Watcher(api, POD, "a=b", reports.put, source="pods")
        made.extend([watcher, api, server])
        watcher.start()
        return server, lambda: reports.get(timeout=20)

    yield go
    for one in made:
        one.close()


def told(report):
    """A report in short: what it is, and of which object in which version."""
    if isinstance(report, Seen):
        meta = report.object["metadata"]
        return f"seen {meta['name']} {meta['resourceVersion']}"
    if isinstance(report, Vanished):
        return f"vanished {report.ref.name}"
    return type(report).__name__.lower()


def test_what_there_is_comes_first_then_changes(follow):
    watch = events(("ADDED", pod("b", "8")), ("MODIFIED", pod("a", "9")), ("DELETED", pod("b", "10")))
    server, following = follow([listing(pod("a", "5"), version="7")], [watch])
    assert [told(following()) for _ in range(5)] == [
        "seen a 5",
        "synced",
        "seen b 8",
        "seen a 9",
        "vanished b",
    ]
    first, second = server.asked
    assert first.query["labelSelector"] == second.query["labelSelector"] == "a=b"
    assert second.query["resourceVersion"] == "7"
    assert second.query["allowWatchBookmarks"] == "true"
    assert 300 <= int(second.query["timeoutSeconds"]) <= 600


def test_reports_say_what_and_who(follow):
    last = pod("a", "9")
    _, following = follow([listing(pod("a", "5"), version="7")], [events(("DELETED", last))])
    seen, synced, vanished = following(), following(), following()
    assert seen == Seen(POD, pod("a", "5") | {"apiVersion": "v1"}, "pods")
    assert synced == Synced("pods")
    assert vanished == Vanished(POD, ObjectRef(POD, "mine", "a", "uid-a"), last, "pods")


@pytest.mark.parametrize("how", ["end", "cut"])
def test_a_watch_that_ended_or_broke_goes_on_from_its_last_event(follow, how):
    bookmark = ("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "20"}})
    watches = [events(("ADDED", pod("a", "8")), then=how), events(bookmark, then=how), events()]
    server, following = follow([listing(version="7")], watches)
    assert [told(following()) for _ in range(2)] == ["synced", "seen a 8"]
    wait_until(lambda: len(server.asked) == 4)
    assert [asked.query.get("resourceVersion") for asked in server.asked] == [None, "7", "8", "20"]


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_forgotten_history_is_listed_anew_and_what_vanished_is_told(follow, how):
    gone = events(GONE) if how == "event" else refusal(410, "too old resource version")
    lists = [listing(pod("a", "5"), pod("b", "6"), pod("c", "6"), version="7"),
             listing(pod("a", "5"), pod("b", "30"), pod("c", "31", "another"), version="40")]  # fmt: skip
    server, following = follow(lists, [gone, events()])
    assert [told(following()) for _ in range(4)] == ["seen a 5", "seen b 6", "seen c 6", "synced"]
    assert [told(following()) for _ in range(4)] == ["vanished c", "seen b 30", "seen c 31", "synced"]
    wait_until(lambda: len(server.asked) == 4)
    assert server.asked[3].query["resourceVersion"] == "40"


def test_a_history_that_is_always_forgotten_is_trouble_and_not_asked_for_without_a_pause(follow):
    _, following = follow([listing(version="7")], [events(GONE)])
    reports = [following() for _ in range(6)]
    assert [told(report) for report in reports[:4]] == ["synced", "synced", "trouble", "synced"]
    assert isinstance(reports[2].error, errors.Gone)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, errors.Unauthorized), (403, errors.Forbidden), (404, errors.NotFound), (500, errors.Unavailable)]
)  # fmt: skip
@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_refusal_is_told_and_healed(follow, status, kind, verb):
    refused = [refusal(status)] * (
        4 if status == 401 else 2
    )  # each 401 is asked again with the token read anew
    script = (
        ([*refused, listing(version="7")], [events()])
        if verb == "list"
        else ([listing(version="7")], [*refused, events()])
    )
    _, following = follow(*script)
    reports = [following() for _ in range(4)]
    assert sorted(told(report) for report in reports) == ["healed", "synced", "trouble", "trouble"]
    troubles = [report for report in reports if isinstance(report, Trouble)]
    assert type(troubles[0].error) is kind
    assert f"cannot {verb} pods" in str(troubles[0].error)
    assert troubles[0].since == troubles[1].since <= time.monotonic()
    assert isinstance(reports[-1], Healed if verb == "watch" else Healed | Synced)


@pytest.mark.parametrize("how", ["end", "cut"])
def test_a_server_that_ends_every_watch_at_once_is_trouble(follow, how):
    _, following = follow([listing(version="7")], [events(then=how)])
    assert [told(following()) for _ in range(4)] == ["synced", "trouble", "healed", "trouble"]


def test_garbage_is_trouble_and_what_follows_is_not_lost(follow):
    def garbage(asked):
        asked.begin()
        asked.piece(b"garbage\n")
        asked.hang()

    server, following = follow([listing(version="7")], [garbage, events(("ADDED", pod("a", "8")))])
    assert [told(following()) for _ in range(4)] == ["synced", "trouble", "healed", "seen a 8"]
    assert server.asked[2].query["resourceVersion"] == "7"


def test_an_unchanged_object_is_told_once(follow):
    _, following = follow(
        [listing(pod("a", "5"), version="7")], [events(("ADDED", pod("a", "5")), ("MODIFIED", pod("a", "6")))]
    )
    assert [told(following()) for _ in range(3)] == ["seen a 5", "synced", "seen a 6"]


def test_objects_that_are_none_are_passed_over(follow):
    odd = events(
        ("ADDED", {}),
        ("ADDED", {"metadata": 7}),
        ("DELETED", {}),
        ("NEW", pod("x", "8")),
        ("ADDED", pod("a", "9")),
    )
    _, following = follow([listing({"metadata": None}, version="7")], [odd])
    assert [told(following()) for _ in range(2)] == ["synced", "seen a 9"]


@pytest.mark.parametrize("where", ["list", "watch", "open watch", "pause"])
def test_closing_does_not_wait_for_the_server(follow, tmp_path, where):
    arrived = threading.Event()

    def hang(asked):
        if where == "open watch":
            asked.begin()
        arrived.set()
        asked.hang()

    def refuse(asked):
        asked.refuse(503, "away", Retry_After="3000")
        arrived.set()

    script = {"list": ([hang], [hang]), "pause": ([refuse], [refuse])}.get(
        where, ([listing(version="7")], [hang])
    )
    server = Scripted(Script(*script))
    api = connect(kubeconfig=str(kubeconfig(tmp_path / "k", f"http://127.0.0.1:{server.port}")), environ={})
    reports = queue.SimpleQueue()
    watcher = Watcher(api, POD, "", reports.put)
    watcher.start()
    assert arrived.wait(20)
    watcher.close()
    watcher.close()
    api.list  # noqa: B018 - the whole is still open
    api.close()
    server.close()
    assert not any(
        isinstance(report, Trouble) and report.error.reason == "closed" for report in drained(reports)
    )


def test_a_watcher_that_never_began_can_be_closed(tmp_path):
    api = connect(kubeconfig=str(kubeconfig(tmp_path / "k", "http://127.0.0.1:9")), environ={})
    watcher = Watcher(api, POD, "", print)
    watcher.close()
    watcher.start()
    watcher.close()
    api.close()


def drained(reports):
    found = []
    while not reports.empty():
        found.append(reports.get())
    return found


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Pauses.

CALL = Call("watch", "pods", "", "mine", "https://x")


@pytest.fixture
def true_pauses(monkeypatch):
    monkeypatch.undo()


@pytest.mark.usefixtures("true_pauses")
@pytest.mark.parametrize(
    ("failures", "least", "most"), [(1, 1, 1.25), (2, 2, 2.5), (5, 16, 20), (6, 30, 37.5), (10_000, 30, 37.5)]
)
def test_a_server_that_is_away_is_asked_less_and_less(failures, least, most):
    assert least <= pauses.pause_after(failures, errors.Unavailable(CALL, "away")) <= most


@pytest.mark.usefixtures("true_pauses")
def test_a_refusal_is_not_tried_again_soon():
    assert 60 <= pauses.pause_after(1, errors.Forbidden(CALL, "no", status=403)) <= 75


@pytest.mark.usefixtures("true_pauses")
def test_a_server_is_left_alone_for_as_long_as_it_asks():
    error = errors.error_of(CALL, 429, {}, "100")
    assert 100 <= pauses.pause_after(1, error) <= 125
