"""Calls against servers that hang, dribble, lie and change their mind; real ones are asked in tests/real."""

from __future__ import annotations

import threading
import time

import pytest
from kubernetes_wire import Listener, Scripted, kubeconfig

from pytest_mlhpc.provision.kubernetes import errors, stream, transport
from pytest_mlhpc.provision.kubernetes.api import Version
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, POD, ObjectRef

REF = ObjectRef(POD, "mine", "p", "uid-1")


def pods(*items, version="7", onward=""):
    return {
        "kind": "PodList",
        "metadata": {"resourceVersion": version, "continue": onward},
        "items": list(items),
    }


@pytest.fixture
def reach(tmp_path):
    """Return an api of a server whose answers a function gives, or of any listener."""
    made = []

    def go(answer, *, limit_s=20.0, scheme="http"):
        server = answer if isinstance(answer, Listener) else Scripted(answer)
        path = kubeconfig(tmp_path / "kubeconfig", f"{scheme}://127.0.0.1:{server.port}")
        api = connect(kubeconfig=str(path), environ={}, limit_s=limit_s)
        made.extend([api, server])
        return api, server

    yield go
    for one in made:
        one.close()


# What is sent.


def test_objects_go_and_come_as_they_are(reach):
    odd = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"siteField": [1, None, {"x": "é"}]}}
    api, server = reach(lambda asked: asked.answer({**asked.body, "status": {"new": True}}))
    before = {**odd}
    assert api.create(POD, odd) == {**odd, "status": {"new": True}}
    assert odd == before
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.body) == ("POST", "/api/v1/namespaces/mine/pods", odd)


def test_an_object_goes_to_the_namespace_that_it_names(reach):
    api, server = reach(lambda asked: asked.answer({}))
    api.create(CONFIG_MAP, {"metadata": {"name": "c", "namespace": "its"}})
    api.create(CONFIG_MAP, {"metadata": {"name": "c", "namespace": "its"}}, "given")
    assert [asked.path.split("/")[4] for asked in server.asked] == ["its", "given"]


def test_a_deletion_takes_what_is_owned_along_and_means_this_very_object(reach):
    api, server = reach(lambda asked: asked.answer({}))
    api.delete(REF, grace_s=0, propagation="Foreground")
    api.delete(ObjectRef(POD, "", "q"))
    assert server.asked[0].body == {
        "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground", "gracePeriodSeconds": 0,
        "preconditions": {"uid": "uid-1"},
    }  # fmt: skip
    assert server.asked[1].body == {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "propagationPolicy": "Background",
    }
    assert server.asked[1].path == "/api/v1/namespaces/mine/pods/q"


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "not found"), (409, "Precondition failed: UID in precondition: uid-1, UID in object meta: uid-2")],
)
def test_deleting_what_is_gone_or_another_is_no_error(reach, status, message):
    api, _ = reach(lambda asked: asked.refuse(status, message))
    api.delete(REF)


def test_deleting_what_may_not_be_deleted_is_an_error(reach):
    api, _ = reach(lambda asked: asked.refuse(409, "the server is busy with it"))
    with pytest.raises(errors.Conflict):
        api.delete(REF)


def test_a_patch_is_a_merge_patch(reach):
    api, server = reach(lambda asked: asked.answer({"done": 1}))
    assert api.patch(REF, {"metadata": {"annotations": None}}) == {"done": 1}
    assert server.asked[0].headers["content-type"] == "application/merge-patch+json"
    assert server.asked[0].body == {"metadata": {"annotations": None}}


def test_a_log_is_asked_for_by_container_and_time(reach):
    api, server = reach(lambda asked: asked.answer(b"a\n\nb"))
    log = api.logs(REF, "main", follow=False, since="2026-01-01T00:00:00Z", limit_bytes=9)
    assert list(log) == [b"a", b""]
    assert log.rest == b"b"
    assert server.asked[0].query == {
        "container": "main", "follow": "false", "timestamps": "true", "sinceTime": "2026-01-01T00:00:00Z", "limitBytes": "9",
    }  # fmt: skip


def test_a_long_list_is_read_in_pages(reach):
    def answer(asked):
        first = "continue" not in asked.query
        asked.answer(pods({"n": 1}, onward="there") if first else pods({"n": 2}, version="8"))

    api, server = reach(answer)
    listing = api.list(POD, labels="a=b", fields="c=d")
    assert [item["n"] for item in listing.items] == [1, 2]
    assert listing.resource_version == "8"
    assert [asked.query.get("continue") for asked in server.asked] == [None, "there"]
    assert all(
        asked.query["labelSelector"] == "a=b" and asked.query["fieldSelector"] == "c=d"
        for asked in server.asked
    )


def test_items_of_a_list_have_their_kind(reach):
    api, _ = reach(lambda asked: asked.answer(pods({"metadata": {"name": "p"}})))
    assert api.list(POD).items == ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}},)


def test_a_list_whose_next_page_is_forgotten_is_read_in_one_go(reach):
    def answer(asked):
        if "continue" in asked.query:
            asked.refuse(410, "too old")
        else:
            asked.answer(
                pods({"n": 1}, onward="there") if "limit" in asked.query else pods({"n": 1}, {"n": 2})
            )

    api, _ = reach(answer)
    assert [item["n"] for item in api.list(POD).items] == [1, 2]


def test_requests_are_counted_with_those_of_branches(reach):
    api, _ = reach(lambda asked: asked.answer(pods()))
    api.list(POD)
    api.branch().list(POD)
    assert api.requests == 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"major": "1", "minor": "20+", "gitVersion": "v1.20.2"}, Version(1, 20, "v1.20.2")),
        ({"major": "1", "minor": "31"}, Version(1, 31, "1.31")),
        ({}, Version(0, 0, "0.0")),
    ],
)
def test_the_version_is_read_leniently(reach, found, expected):
    api, _ = reach(lambda asked: asked.answer(found))
    assert api.version() == expected


def test_events_are_in_order(reach):
    events = [
        {"lastTimestamp": "2026-01-01T00:00:02Z"},
        {"eventTime": "2026-01-01T00:00:01Z", "lastTimestamp": None},
    ]
    api, server = reach(lambda asked: asked.answer(pods(*events)))
    assert [bool(event["lastTimestamp"]) for event in api.events("u")] == [False, True]
    assert server.asked[0].query["fieldSelector"] == "involvedObject.uid=u"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda asked: asked.answer({"status": {"allowed": True}}), True),
        (lambda asked: asked.answer({"status": {"allowed": False}}), False),
        (lambda asked: asked.answer({}), None),
        (lambda asked: asked.refuse(403, "no"), None),
        (lambda asked: asked.refuse(404, "no"), None),
    ],
)
def test_rights_are_told_where_the_server_tells_them(reach, answer, expected):
    api, server = reach(answer)
    assert api.allowed(POD, "get", "log") is expected
    assert server.asked[0].body["spec"]["resourceAttributes"] == {
        "namespace": "mine", "verb": "get", "group": "", "resource": "pods", "subresource": "log",
    }  # fmt: skip


# Credentials.


def test_a_token_that_expired_is_read_again_once(reach, tmp_path):
    def answer(asked):
        if asked.headers["authorization"] == "Bearer new":
            asked.answer(pods())
        else:
            kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.port}", {"token": "new"})
            asked.refuse(401, "expired")

    api, server = reach(answer)
    api.list(POD)
    api.list(POD)
    assert [asked.headers["authorization"] for asked in server.asked] == [
        "Bearer secret-token",
        "Bearer new",
        "Bearer new",
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda api: api.list(POD),
        lambda api: api.watch(POD, resource_version="1", timeout_s=60),
        lambda api: api.logs(REF, "main", follow=True),
    ],
)
def test_a_token_that_is_never_taken_is_tried_twice_and_told(reach, call):
    api, server = reach(lambda asked: asked.refuse(401, "who are you"))
    with pytest.raises(errors.Unauthorized, match=r"401: who are you\. Log in to the cluster again"):
        call(api)
    assert len(server.asked) == 2


# Servers that are none.


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda asked: asked.answer(b"<html>log in to the wifi</html>"), "no JSON object: '<html>log in"),
        (lambda asked: asked.answer([1]), "no JSON object"),
        (lambda asked: asked.answer(b"[" * 100_000), "no JSON object"),
        (lambda asked: asked.answer({"items": 7}), "the answer is no list"),
        (lambda asked: asked.connection.sendall(b"\x00\x01garbage\r\n\r\n") or asked.connection.close(), "cannot list pods"),
        (lambda asked: asked.connection.close(), "cannot list pods"),
        (lambda asked: asked.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{") or asked.connection.close(),
         "cannot list pods"),
        (lambda asked: asked.refuse(503, "etcd is away"), "503: etcd is away"),
        (lambda asked: asked.answer(b"Bad Gateway", 502), "502: Bad Gateway"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_unavailable(reach, answer, words):
    api, server = reach(answer)
    with pytest.raises(errors.Unavailable, match=words):
        api.list(POD)
    assert len(server.asked) == 1, "nothing is tried again without a pause"


def test_a_redirect_is_not_followed(reach):
    api, server = reach(
        lambda asked: asked.answer({}, 302, Location=f"http://127.0.0.1:{server.port}/elsewhere")
    )
    with pytest.raises(errors.KubernetesError, match=r"points elsewhere.*is no API server"):
        api.list(POD)
    assert len(server.asked) == 1


def test_an_answer_too_large_is_not_read_to_its_end(reach, monkeypatch):
    monkeypatch.setattr(transport, "MOST_BYTES", 1000)

    def answer(asked):
        asked.begin()
        while True:
            asked.piece(b"x" * 100_000)

    api, _ = reach(answer)
    with pytest.raises(errors.Unavailable, match="more than 1000 bytes"):
        api.list(POD)


def test_nobody_listens(reach):
    api, server = reach(lambda asked: None)
    server.refuse()
    with pytest.raises(errors.Unavailable, match=r"cannot list pods.* Connection refused"):
        api.list(POD)


def hang(asked):
    asked.hang()


def dribble_head(asked):
    while True:
        asked.connection.sendall(b"H")
        time.sleep(0.02)


def dribble_body(asked):
    asked.begin()
    while True:
        asked.piece(b" ")
        time.sleep(0.02)


@pytest.mark.parametrize("answer", [hang, dribble_head, dribble_body])
def test_a_slow_server_gets_one_time_limit_for_all(reach, answer):
    api, _ = reach(answer, limit_s=0.4)
    with pytest.raises(errors.Unavailable, match=r"no answer within 0\.4 s"):
        api.list(POD)


def swallow(connection):
    while connection.recv(65536):
        pass


def test_a_server_that_never_shakes_hands_gets_no_more_time(reach):
    api, _ = reach(Listener(swallow), limit_s=0.4, scheme="https")
    with pytest.raises(errors.Unavailable, match=r"no answer within 0\.4 s"):
        api.list(POD)


def test_a_stream_may_be_silent_for_longer_than_a_call(reach):
    silent = threading.Event()

    def answer(asked):
        asked.begin()
        silent.wait(2.2)
        asked.piece(b"late\n")
        asked.end()

    api, _ = reach(answer, limit_s=1.5)
    assert list(api.logs(REF, "main", follow=True)) == [b"late"]


def test_a_stream_that_never_begins_gets_the_time_of_a_call(reach):
    api, _ = reach(hang, limit_s=0.4)
    with pytest.raises(errors.Unavailable, match=r"no answer within 0\.4 s"):
        api.watch(POD, resource_version="1", timeout_s=600)


# Closing.


def in_thread(call):
    """Run *call* in a thread; return the thread and where its outcome will be."""
    outcome = []

    def go():
        try:
            outcome.append(call())
        except errors.KubernetesError as error:
            outcome.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_closing_ends_a_call_that_waits(reach, scheme):
    arrived = threading.Event()

    def serve(connection):
        connection.recv(1)
        arrived.set()
        while connection.recv(65536):
            pass

    api, _ = reach(Listener(serve), scheme=scheme)
    branch = api.branch()
    thread, outcome = in_thread(lambda: branch.list(POD))
    assert arrived.wait(10)
    branch.close()
    thread.join(10)
    assert isinstance(outcome[0], errors.Unavailable)
    assert outcome[0].reason == "closed"


@pytest.mark.parametrize("kind", ["watch", "logs"])
def test_closing_a_stream_wakes_who_reads_it_without_an_error(reach, kind):
    begun = threading.Event()

    def answer(asked):
        asked.begin()
        begun.set()
        asked.hang()

    api, _ = reach(answer)
    found = (
        api.watch(POD, resource_version="1", timeout_s=600)
        if kind == "watch"
        else api.logs(REF, "m", follow=True)
    )
    thread, outcome = in_thread(lambda: list(found))
    assert begun.wait(10)
    found.close()
    thread.join(10)
    assert outcome == [[]]
    found.close()


def test_a_branch_ends_alone_and_all_end_with_the_whole(reach):
    api, _ = reach(lambda asked: asked.answer(pods()))
    one, other = api.branch(), api.branch()
    one.close()
    with pytest.raises(errors.Unavailable, match="was closed"):
        one.list(POD)
    other.list(POD)
    api.close()
    for closed in (api, other, api.branch()):
        with pytest.raises(errors.Unavailable, match="was closed"):
            closed.list(POD)


def test_no_descriptor_is_left(reach, descriptors):
    api, server = reach(
        lambda asked: asked.refuse(404, "no") if "q" in asked.path else asked.answer(b"x\ny\n")
    )
    before = descriptors()
    for _ in range(20):
        with pytest.raises(errors.NotFound):
            api.get(ObjectRef(POD, "mine", "q"))
        next(iter(api.logs(REF, "main", follow=True)))
        api.logs(REF, "main", follow=True).close()
    api.close()
    server.cut()
    assert descriptors() <= before + 1


@pytest.fixture
def descriptors():
    import gc
    import os

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count

    return count


# Streams.


@pytest.mark.parametrize(
    ("pieces", "expected", "rest"),
    [
        ([], [], b""),
        ([b"a\nb\n"], [b"a", b"b"], b""),
        ([b"a", b"b", b"\n", b"c"], [b"ab"], b"c"),
        ([b"\n\n", b"\r\n"], [b"", b"", b"\r"], b""),
        ([b"0123456789ab", b"cd", b"\nx\n"], [b"0123456789ab", b"cd", b"x"], b""),
    ],
)
def test_lines_come_whole_however_they_are_cut(pieces, expected, rest):
    left = []
    assert list(stream.lines(pieces, 10, left)) == expected
    assert left == [rest]


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"[]",
        b"{}",
        b'{"type": 1, "object": {}}',
        b'{"type": "ADDED", "object": []}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_line_that_is_no_event_breaks_the_watch(reach, line):
    def answer(asked):
        asked.begin()
        asked.event("ADDED", {"metadata": {"name": "p"}})
        asked.piece(line + b"\n")
        asked.hang()

    api, _ = reach(answer)
    watch = iter(api.watch(POD, resource_version="1", timeout_s=60))
    assert next(watch).type == "ADDED"
    with pytest.raises(errors.Unavailable, match="this is no watch event"):
        next(watch)


@pytest.mark.parametrize("proper", [True, False])
def test_half_an_event_breaks_the_watch(reach, proper):
    def answer(asked):
        asked.begin()
        asked.piece(b'{"type": "ADDED", "obj')
        if proper:
            asked.end()
        asked.connection.close()

    api, _ = reach(answer)
    with pytest.raises(errors.Unavailable, match=r"in the middle of an event|the connection broke"):
        list(api.watch(POD, resource_version="1", timeout_s=60))


def test_an_error_within_a_watch_is_raised_as_what_it_is(reach):
    def answer(asked):
        asked.begin()
        asked.event(
            "ERROR",
            {
                "kind": "Status",
                "code": 410,
                "message": "too old resource version: 1 (9)",
                "reason": "Expired",
            },
        )
        asked.hang()

    api, _ = reach(answer)
    with pytest.raises(errors.Gone, match="410 Expired: too old resource version"):
        list(api.watch(POD, resource_version="1", timeout_s=60))


def test_a_log_that_is_cut_is_told_from_one_that_ended(reach):
    def answer(asked):
        asked.begin()
        asked.piece(b"one\ntw")
        asked.connection.close()

    api, _ = reach(answer)
    seen = []
    log = api.logs(REF, "main", follow=True)
    with pytest.raises(errors.Unavailable, match="the connection broke"):
        seen.extend(log)
    assert seen in ([], [b"one"])  # `extend` may keep nothing of what it was taking
    assert log.rest == b""
