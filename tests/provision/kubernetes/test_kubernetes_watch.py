"""Watching a kind: what is reported, from which version it continues, and how often a failing server is called."""

import threading

import pytest
from kubernetes_wire import kubeconfig
from local_allocations import HANG_S, wait_until

from pytest_mlhpc.provision.kubernetes import errors
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import ApiCall
from pytest_mlhpc.provision.kubernetes.objects import POD, ObjectRef
from pytest_mlhpc.provision.kubernetes.watch import (
    ListSynced,
    ObjectChanged,
    ObjectDeleted,
    ObjectWatcher,
    WatchFailing,
    WatchRecovered,
)


def pod(name, version, uid=""):
    meta = {"name": name, "namespace": "mine", "uid": uid or f"uid-{name}", "resourceVersion": version}
    return {"kind": "Pod", "metadata": meta}


class Script:
    """Answers lists and watches one after the other; the last of each kind is repeated."""

    def __init__(self, lists, watches):
        self.lists, self.watches = list(lists), list(watches)

    def __call__(self, asked):
        steps = self.watches if asked.query.get("watch") else self.lists
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        step(asked)


def listing(*items, version="7"):
    answer = {"kind": "PodList", "metadata": {"resourceVersion": version}, "items": list(items)}
    return lambda asked: asked.answer(answer)


def hang(asked):
    asked.hang()


def end(asked):
    asked.end()


def cut(asked):
    asked.connection.close()


def garbage(asked):
    asked.piece(b"garbage\n")
    asked.hang()


def events(*changes, then=hang):
    def step(asked):
        asked.begin()
        for kind, content in changes:
            asked.event(kind, content)
        then(asked)

    return step


def refusal(status, message="no", **headers):
    return lambda asked: asked.refuse(status, message, **headers)


GONE = ("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version", "reason": "Expired"})


@pytest.fixture
def follow(reach, closing, reports, short_pauses):
    """Start a watcher of a server with this script; return watcher and server."""

    def go(*script):
        api, server = reach(Script(*script))
        watcher = closing(ObjectWatcher(api, POD, "a=b", reports.put, source="pods"))
        watcher.start()
        return watcher, server

    return go


def in_short(report):
    """Return what a report is, and of which object in which version."""
    if isinstance(report, ObjectChanged):
        meta = report.object["metadata"]
        return f"changed {meta['name']} {meta['resourceVersion']}"
    if isinstance(report, ObjectDeleted):
        return f"deleted {report.ref.name}"
    return {ListSynced: "synced", WatchFailing: "failing", WatchRecovered: "recovered"}[type(report)]


@pytest.fixture
def next_reports(reports):
    """Return the next reports in short."""
    return lambda number: [in_short(report) for report in reports.next(number)]


CHANGES = events(("ADDED", pod("b", "8")), ("MODIFIED", pod("a", "9")), ("DELETED", pod("b", "10")))
ODD = [("ADDED", {}), ("ADDED", {"metadata": 7}), ("DELETED", {}), ("NEW", pod("x", "8"))]


@pytest.mark.parametrize(
    ("items", "watches", "expected"),
    [
        pytest.param(
            [pod("a", "5")], [CHANGES], ["changed a 5", "synced", "changed b 8", "changed a 9", "deleted b"],
            id="what there is comes first, then changes",
        ),
        pytest.param(
            [pod("a", "5")], [events(("ADDED", pod("a", "5")), ("MODIFIED", pod("a", "6")))], ["changed a 5", "synced", "changed a 6"],
            id="an unchanged object is reported once",
        ),
        pytest.param(
            [{"metadata": None}], [events(*ODD, ("ADDED", pod("a", "9")))], ["synced", "changed a 9"],
            id="objects that are none are passed over",
        ),
        pytest.param([], [events(then=end)], ["synced", "failing", "recovered", "failing"], id="a server that ends every watch at once"),
        pytest.param([], [events(then=cut)], ["synced", "failing", "recovered", "failing"], id="a server that cuts every watch at once"),
        pytest.param(
            [], [events(then=garbage), events(("ADDED", pod("a", "8")))], ["synced", "failing", "recovered", "changed a 8"],
            id="after garbage nothing is lost",
        ),
    ],
)  # fmt: skip
def test_a_watch_tells(follow, next_reports, items, watches, expected):
    _, server = follow([listing(*items)], watches)
    assert next_reports(len(expected)) == expected
    assert {asked.query.get("resourceVersion") for asked in server.asked[1:]} == {"7"}


def test_a_watch_asks_for_its_labels_from_the_list_on_and_for_bookmarks(follow, next_reports):
    _, server = follow([listing()], [events(("ADDED", pod("a", "8")))])
    next_reports(2)
    first, second = (asked.query for asked in server.asked)
    assert first["labelSelector"] == "a=b"
    expected = {"labelSelector": "a=b", "resourceVersion": "7", "allowWatchBookmarks": "true"}
    assert second.items() >= expected.items()
    assert 300 <= int(second["timeoutSeconds"]) <= 600


def test_reports_say_what_and_who(follow, reports):
    last = pod("a", "9")
    follow([listing(pod("a", "5"))], [events(("DELETED", last))])
    assert reports.next(3) == [
        ObjectChanged(POD, pod("a", "5") | {"apiVersion": "v1"}, "pods"),
        ListSynced("pods"),
        ObjectDeleted(POD, ObjectRef(POD, "mine", "a", "uid-a"), last, "pods"),
    ]


@pytest.mark.parametrize("how", [end, cut])
def test_a_watch_that_ended_or_broke_goes_on_from_its_last_event(follow, next_reports, how):
    bookmark = ("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "20"}})
    watches = [events(("ADDED", pod("a", "8")), then=how), events(bookmark, then=how), events()]
    _, server = follow([listing()], watches)
    assert next_reports(2) == ["synced", "changed a 8"]
    wait_until(lambda: len(server.asked) == 4)
    assert [asked.query.get("resourceVersion") for asked in server.asked] == [None, "7", "8", "20"]


@pytest.mark.parametrize("gone", [events(GONE), refusal(410, "too old resource version")], ids=["event", "status"])  # fmt: skip
def test_after_an_expired_version_objects_are_listed_anew_and_deleted_ones_reported(
    follow, next_reports, gone
):
    before = listing(pod("a", "5"), pod("b", "6"), pod("c", "6"))
    after = listing(pod("a", "5"), pod("b", "30"), pod("c", "31", "another"), version="40")
    _, server = follow([before, after], [gone, events()])
    assert next_reports(4) == ["changed a 5", "changed b 6", "changed c 6", "synced"]
    assert next_reports(4) == ["deleted c", "changed b 30", "changed c 31", "synced"]
    wait_until(lambda: len(server.asked) == 4)
    assert server.asked[3].query["resourceVersion"] == "40"


def test_a_history_that_is_always_forgotten_is_trouble_and_not_asked_for_without_a_pause(follow, reports):
    follow([listing()], [events(GONE)])
    found = reports.next(4)
    assert [in_short(report) for report in found] == ["synced", "synced", "failing", "synced"]
    assert isinstance(found[2].error, errors.Expired)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, errors.Unauthorized), (403, errors.Forbidden), (404, errors.NotFound), (500, errors.Unavailable)]
)  # fmt: skip
@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_refusal_is_reported_and_recovers(follow, reports, status, kind, verb):
    # Each 401 is asked again with the token read anew.
    refused = [refusal(status)] * (4 if status == 401 else 2)
    follow([*refused * (verb == "list"), listing()], [*refused * (verb == "watch"), events()])
    found = reports.next(4)
    assert sorted(in_short(report) for report in found) == ["failing", "failing", "recovered", "synced"]
    first, second = [report for report in found if isinstance(report, WatchFailing)]
    assert (type(first.error), first.since) == (kind, second.since)
    assert f"cannot {verb} pods" in str(first.error)
    assert isinstance(found[-1], WatchRecovered if verb == "watch" else WatchRecovered | ListSynced)


@pytest.mark.parametrize("where", ["list", "watch", "open watch", "pause"])
def test_closing_does_not_wait_for_the_server(follow, reports, where):
    arrived = threading.Event()

    def stall(asked):
        if where == "open watch":
            asked.begin()
        if where == "pause":
            asked.refuse(503, "away", Retry_After="3000")
        arrived.set()
        asked.hang()

    watcher, _ = follow([listing() if "watch" in where else stall], [stall])
    assert arrived.wait(HANG_S)
    watcher.close()
    watcher.close()
    troubles = [report for report in reports.rest() if isinstance(report, WatchFailing)]
    assert all(trouble.error.reason != "closed" for trouble in troubles)


def test_a_watcher_that_never_began_can_be_closed(tmp_path, closing):
    api = closing(connect(kubeconfig=str(kubeconfig(tmp_path / "k", "http://127.0.0.1:9")), environ={}))
    watcher = ObjectWatcher(api, POD, "", print)
    watcher.close()
    watcher.start()
    watcher.close()


# --- pauses

CALL = ApiCall("watch", "pods", "", "mine", "https://x")
AWAY = errors.Unavailable(CALL, "away")


@pytest.mark.parametrize(
    ("failures", "error", "least", "most"),
    [
        *[(failures, AWAY, pause, 1.25 * pause) for failures, pause in ((1, 1), (2, 2), (5, 16), (6, 30), (10_000, 30))],
        pytest.param(1, errors.Forbidden(CALL, "no", status=403), 60, 75, id="a refusal is not tried again soon"),
        pytest.param(1, errors.error_from_status(CALL, 429, {}, "100"), 100, 125, id="a server is left alone for as long as it asks"),
    ],
)  # fmt: skip
def test_a_server_is_asked_again_after_a_pause(failures, error, least, most):
    assert least <= errors.retry_delay(failures, error) <= most
