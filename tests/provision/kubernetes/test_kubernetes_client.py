"""Calls and streams against servers that hang, send little, or break off; tests/real calls real servers."""

import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kubernetes_wire import Listener, kubeconfig
from local_allocations import HANG_S

from pytest_mlhpc.provision.kubernetes import client, errors
from pytest_mlhpc.provision.kubernetes.objects import POD, SECRET, ObjectRef

REF = ObjectRef(POD, "mine", "p", "uid-1")


def pods(*items, version="7", onward=""):
    meta = {"resourceVersion": version, "continue": onward}
    return {"kind": "PodList", "metadata": meta, "items": list(items)}


def answering(content):
    return lambda asked: asked.answer(content)


def refusing(status, message="no"):
    return lambda asked: asked.refuse(status, message)


def endless(piece):
    """Begin an answer, and send such pieces for ever."""

    def answer(asked):
        asked.begin()
        while True:
            asked.piece(piece)
            time.sleep(0.02)

    return answer


def watch(api):
    return api.watch(POD, resource_version="1", timeout_s=600)


def log(api):
    return api.logs(REF, "main", follow=True)


# --- what is sent


def test_objects_go_and_come_as_they_are(reach):
    odd = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"siteField": [1, None, {"x": "é"}]}}
    before = {**odd}
    api, server = reach(lambda asked: asked.answer({**asked.body, "status": {"new": True}}))
    assert api.create(POD, odd) == {**before, "status": {"new": True}}
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.body) == ("POST", "/api/v1/namespaces/mine/pods", before)
    assert odd == before


CONFIG = {"metadata": {"name": "c", "namespace": "its"}}
DELETION = {"kind": "DeleteOptions", "apiVersion": "v1"}
FOREGROUND = {"propagationPolicy": "Foreground", "gracePeriodSeconds": 0, "preconditions": {"uid": "uid-1"}}
NO_NOTES = {"metadata": {"annotations": None}}
SINCE = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(
            lambda api: api.create(SECRET, CONFIG), {"path": "/api/v1/namespaces/its/secrets"},
            id="an object goes to the namespace that it names",
        ),
        pytest.param(
            lambda api: api.create(SECRET, CONFIG, "given"), {"path": "/api/v1/namespaces/given/secrets"},
            id="or to the one that is given",
        ),
        pytest.param(
            lambda api: api.delete(REF, grace_s=0, propagation="Foreground"),
            {"path": "/api/v1/namespaces/mine/pods/p", "body": {**DELETION, **FOREGROUND}},
            id="a deletion means this very object",
        ),
        pytest.param(
            lambda api: api.delete(ObjectRef(POD, "", "q")),
            {"path": "/api/v1/namespaces/mine/pods/q", "body": {**DELETION, "propagationPolicy": "Background"}},
            id="a deletion takes what is owned along",
        ),
        pytest.param(lambda api: api.patch(REF, NO_NOTES), {"method": "PATCH", "body": NO_NOTES}, id="a patch"),
        pytest.param(
            lambda api: api.logs(REF, "main", follow=False, since=SINCE).close(),
            {
                "query": {
                    "container": "main", "follow": "false", "timestamps": "true", "sinceTime": SINCE,
                }
            },
            id="a log is asked for by container and time",
        ),
    ],
)  # fmt: skip
def test_a_call_is_sent(reach, call, expected):
    api, server = reach(answering({}))
    call(api)
    assert {name: getattr(server.asked[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "not found"), (409, "Precondition failed: UID in precondition: uid-1, UID in object meta: uid-2")],
)
def test_deleting_what_is_gone_or_another_is_no_error(reach, status, message):
    api, server = reach(refusing(status, message))
    api.delete(REF)
    assert len(server.asked) == 1


def test_deleting_what_may_not_be_deleted_is_an_error(reach):
    api, _ = reach(refusing(409, "the server is busy with it"))
    with pytest.raises(errors.Conflict):
        api.delete(REF)


def test_a_patch_is_a_merge_patch(reach):
    api, server = reach(answering({"done": 1}))
    assert api.patch(REF, NO_NOTES) == {"done": 1}
    assert server.asked[0].headers["content-type"] == "application/merge-patch+json"


def test_a_log_has_lines_and_a_rest(reach):
    found = reach(answering(b"a\n\nb"))[0].logs(REF, "main", follow=False)
    assert (list(found), found.rest) == ([b"a", b""], b"b")


def test_a_long_list_is_read_in_pages(reach):
    def answer(asked):
        first = "continue" not in asked.query
        asked.answer(pods({"n": 1}, onward="there") if first else pods({"n": 2}, version="8"))

    api, server = reach(answer)
    found = api.list(POD, labels="a=b", fields="c=d")
    assert ([item["n"] for item in found.items], found.resource_version) == ([1, 2], "8")
    first, second = (asked.query for asked in server.asked)
    assert first.items() >= {"labelSelector": "a=b", "fieldSelector": "c=d"}.items()
    assert second == {**first, "continue": "there"}


def test_items_of_a_list_have_their_kind(reach):
    items = reach(answering(pods({"metadata": {"name": "p"}})))[0].list(POD).items
    assert items == ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}},)


def test_a_list_whose_next_page_is_forgotten_is_read_in_one_go(reach):
    def answer(asked):
        if "continue" in asked.query:
            asked.refuse(410, "too old")
        elif "limit" in asked.query:
            asked.answer(pods({"n": 1}, onward="there"))
        else:
            asked.answer(pods({"n": 1}, {"n": 2}))

    api, _ = reach(answer)
    assert [item["n"] for item in api.list(POD).items] == [1, 2]


def test_requests_are_counted_with_those_of_branches(reach):
    api, _ = reach(answering(pods()))
    api.list(POD)
    api.branch().list(POD)
    assert api.requests == 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"major": "1", "minor": "20+", "gitVersion": "v1.20.2"}, "v1.20.2"),
        ({"major": "1", "minor": "31"}, "1.31"),
        ({}, "0.0"),
    ],
)
def test_the_version_is_read_leniently(reach, found, expected):
    assert reach(answering(found))[0].version() == expected


def test_of_the_versions_of_an_api_the_preferred_one_comes_first(reach):
    served = [{"version": "v1beta1"}, {"version": "v1beta2"}]
    api, server = reach(answering({"versions": served, "preferredVersion": {"version": "v1beta2"}}))
    assert api.versions("kueue.x-k8s.io") == ("v1beta2", "v1beta1")
    assert server.asked[0].path == "/apis/kueue.x-k8s.io"


def test_events_are_in_order(reach):
    late = {"lastTimestamp": "2026-01-01T00:00:02Z"}
    early = {"eventTime": "2026-01-01T00:00:01Z", "lastTimestamp": None}
    api, server = reach(answering(pods(late, early)))
    assert [bool(event["lastTimestamp"]) for event in api.events("u")] == [False, True]
    assert server.asked[0].query["fieldSelector"] == "involvedObject.uid=u"


# --- credentials


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
    tokens = [asked.headers["authorization"].removeprefix("Bearer ") for asked in server.asked]
    assert tokens == ["secret-token", "new", "new"]


@pytest.mark.parametrize("call", [lambda api: api.list(POD), watch, log], ids=["list", "watch", "log"])
def test_a_rejected_token_is_tried_twice_and_reported(reach, call):
    api, server = reach(refusing(401, "who are you"))
    with pytest.raises(errors.Unauthorized, match=r"401: who are you\. Log in to the cluster again"):
        call(api)
    assert len(server.asked) == 2


# --- servers that are none


def sending(data):
    """Send this, and hang up."""

    def answer(asked):
        asked.connection.sendall(data)
        asked.connection.close()

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answering(b"<html>log in to the wifi</html>"), "no JSON object: '<html>log in"),
        (answering([1]), "no JSON object"),
        (answering(b"[" * 100_000), "no JSON object"),
        (answering({"items": 7}), "the answer is no list"),
        (sending(b"\x00\x01garbage\r\n\r\n"), "cannot list pods"),
        (sending(b""), "cannot list pods"),
        (sending(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "cannot list pods"),
        (refusing(503, "etcd is away"), "503: etcd is away"),
        (lambda asked: asked.answer(b"Bad Gateway", 502), "502: Bad Gateway"),
    ],
)
def test_what_is_no_answer_is_unavailable(reach, answer, words):
    api, server = reach(answer)
    with pytest.raises(errors.Unavailable, match=words):
        api.list(POD)
    assert len(server.asked) == 1, "nothing is tried again without a pause"


def test_a_redirect_is_not_followed(reach):
    api, server = reach(lambda asked: asked.answer({}, 302, Location="http://127.0.0.1:9/elsewhere"))
    with pytest.raises(errors.KubernetesError, match=r"points elsewhere.*is no API server"):
        api.list(POD)
    assert len(server.asked) == 1


def test_an_answer_too_large_is_not_read_to_its_end(reach, monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
    api, _ = reach(endless(b"x" * 100_000))
    with pytest.raises(errors.Unavailable, match="more than 1000 bytes"):
        api.list(POD)


def test_a_server_that_is_not_there_is_unavailable(reach):
    api, server = reach(hang)
    server.refuse()
    with pytest.raises(errors.Unavailable, match=r"cannot list pods.* Connection refused"):
        api.list(POD)


def hang(asked):
    asked.hang()


def dribble_head(asked):
    while True:
        asked.connection.sendall(b"H")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        (hang, lambda api: api.list(POD)),
        (dribble_head, lambda api: api.list(POD)),
        pytest.param(endless(b" "), lambda api: api.list(POD), id="dribble_body"),
        pytest.param(hang, watch, id="a stream that never begins"),
    ],
)
def test_a_slow_server_gets_one_time_limit_for_all(reach, answer, call):
    api, _ = reach(answer, limit_s=0.2)
    with pytest.raises(errors.Unavailable, match=r"no answer within 0\.2 s"):
        call(api)


def swallow(connection):
    while connection.recv(65536):
        pass


def test_a_server_that_never_shakes_hands_gets_no_more_time(reach):
    api, _ = reach(Listener(swallow), limit_s=0.2, scheme="https")
    with pytest.raises(errors.Unavailable, match=r"no answer within 0\.2 s"):
        api.list(POD)


def test_a_stream_may_be_silent_for_longer_than_a_call(reach, monkeypatch):
    limits, silent = [], threading.Event()
    limited = client.time_limit

    @contextlib.contextmanager
    def noted(*args):
        limits.append("begun")
        with limited(*args):
            yield
        limits.append("over")

    def answer(asked):
        asked.begin()
        silent.wait(HANG_S)
        asked.piece(b"late\n")
        asked.end()

    monkeypatch.setattr(client, "time_limit", noted)
    api, _ = reach(answer)
    found = log(api)
    assert limits == ["begun", "over"]
    assert found._response.connection.sock.gettimeout() is None
    silent.set()
    assert list(found) == [b"late"]


# --- closing


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_closing_ends_a_call_that_waits(reach, scheme):
    arrived = threading.Event()

    def serve(connection):
        connection.recv(1)
        arrived.set()
        swallow(connection)

    branch = reach(Listener(serve), scheme=scheme)[0].branch()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(branch.list, POD)
        assert arrived.wait(HANG_S)
        branch.close()
        error = waiting.exception(HANG_S)
    assert (type(error), error.reason) == (errors.Unavailable, "closed")


@pytest.mark.parametrize("kind", [watch, log])
def test_closing_a_stream_wakes_who_reads_it_without_an_error(reach, kind):
    begun = threading.Event()

    def answer(asked):
        asked.begin()
        begun.set()
        asked.hang()

    found = kind(reach(answer)[0])
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(list, found)
        assert begun.wait(HANG_S)
        found.close()
        assert waiting.result(HANG_S) == []
    found.close()


def test_a_branch_ends_alone_and_all_end_with_the_whole(reach):
    api, _ = reach(answering(pods()))
    one, other = api.branch(), api.branch()
    one.close()
    other.list(POD)
    api.close()
    for closed in (one, api, other, api.branch()):
        with pytest.raises(errors.Unavailable, match="was closed"):
            closed.list(POD)


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left(reach):
    api, server = reach(
        lambda asked: asked.refuse(404, "no") if "q" in asked.path else asked.answer(b"x\ny\n")
    )
    before = descriptors()
    for _ in range(20):
        with pytest.raises(errors.NotFound):
            api.get(ObjectRef(POD, "mine", "q"))
        next(iter(log(api)))
        log(api).close()
    api.close()
    server.cut()
    assert descriptors() <= before + 1


# --- streams


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
    assert (list(client.split_lines(pieces, 10, left)), left) == (expected, [rest])


ADDED = b'{"type": "ADDED", "object": {"metadata": {"name": "p"}}}\n'
EXPIRED = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old: 1 (9)", "reason": "Expired"}}\n'


@pytest.mark.parametrize(
    ("data", "then", "kind", "words"),
    [
        *[
            (line + b"\n", hang, errors.Unavailable, "this is no watch event")
            for line in (
                b"garbage", b"[]", b"{}", b'{"type": 1, "object": {}}', b'{"type": "ADDED", "object": []}', b"[" * 100_000, b"\xff",
            )
        ],
        pytest.param(
            ADDED[:20], lambda asked: asked.end(), errors.Unavailable, "in the middle of an event", id="half an event",
        ),
        pytest.param(
            ADDED[:20], lambda asked: asked.connection.close(), errors.Unavailable,
            "in the middle of an event|the connection broke", id="a cut",
        ),
        pytest.param(EXPIRED, hang, errors.Expired, r"410 Expired: too old: 1 \(9\)", id="an error is raised as what it is"),
    ],
)  # fmt: skip
def test_what_is_no_event_breaks_the_watch_after_those_before(reach, data, then, kind, words):
    first_was_read = threading.Event()

    def answer(asked):
        asked.begin()
        asked.piece(ADDED)
        first_was_read.wait(HANG_S)
        asked.piece(data)
        then(asked)

    api, _ = reach(answer)
    found = iter(watch(api))
    assert next(found).type == "ADDED"
    first_was_read.set()
    with pytest.raises(kind, match=words):
        next(found)


def test_a_log_that_is_cut_differs_from_one_that_ended(reach):
    api, _ = reach(lambda asked: [asked.begin(), asked.piece(b"one\ntw"), asked.connection.close()])
    found = log(api)
    with pytest.raises(errors.Unavailable, match="the connection broke"):
        list(found)
    assert found.rest == b""
