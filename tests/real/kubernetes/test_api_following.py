"""Watches and logs of a real server over wires that are cut."""

from api_parts import CONFIG_MAP, config_map
from running_suites import LIMIT_S, wait_for

from pytest_mlhpc.provision.kubernetes import errors, log_follower
from pytest_mlhpc.provision.kubernetes.log_follower import LogLine
from pytest_mlhpc.provision.kubernetes.objects import object_ref
from pytest_mlhpc.provision.kubernetes.watch import (
    ListSynced,
    ObjectChanged,
    ObjectDeleted,
    WatchFailing,
    WatchRecovered,
)


def test_a_watch_tells_what_happens_while_its_wire_is_cut(parts):
    wire, api = parts.wired()
    first = object_ref(CONFIG_MAP, parts.api.create(CONFIG_MAP, config_map("first")))
    reports = parts.watch(api, CONFIG_MAP, "of=test")
    reports.changed("first")
    reports.until(lambda report: isinstance(report, ListSynced))
    wait_for(lambda: api.requests >= 2)
    wire.blocked = True
    wait_for(wire.cut)
    parts.api.create(CONFIG_MAP, config_map("second"))
    parts.api.patch(first, {"data": {"changed": "1"}})
    parts.api.delete(first)
    reports.until(lambda report: isinstance(report, WatchFailing))
    wire.blocked = False
    reports.deleted("first")
    kinds = [type(report) for report in reports.all if not isinstance(report, WatchFailing)]
    assert kinds == [
        ObjectChanged,
        ListSynced,
        WatchRecovered,
        ObjectChanged,
        ObjectChanged,
        ObjectDeleted,
    ], "it went on; it did not list again"


def test_a_watch_outlives_the_token_that_it_began_with(parts, kubernetes, tmp_path):
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}
    account = kubernetes.account(parts.namespace, tmp_path, [rule])
    wire, api = parts.wired(account.kubeconfig)
    reports = parts.watch(api, CONFIG_MAP, "of=test")
    reports.until(lambda report: isinstance(report, ListSynced))
    parts.api.create(CONFIG_MAP, config_map("sooner"))
    reports.changed("sooner")  # a watch that breaks before its first event has failed
    account.expire()
    account.renew()
    wait_for(wire.cut)  # the next watch meets 401 with the old token
    parts.api.create(CONFIG_MAP, config_map("later"))
    reports.changed("later")
    assert not [report for report in reports.all if isinstance(report, WatchFailing)]


def test_a_log_outlives_the_token_that_it_began_with(parts, kubernetes, tmp_path):
    rule = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get"]}
    account = kubernetes.account(parts.namespace, tmp_path, [rule])
    wire, api = parts.wired(account.kubeconfig)
    ref = parts.pod("echo first; until [ -e /tmp/go ]; do sleep 0.1; done; echo last", name="p")
    _, reports = parts.follow(api, ref)
    reports.until(lambda report: isinstance(report, LogLine))
    account.expire()
    account.renew()
    wait_for(wire.cut)
    parts.api.delete(ref, grace_s=1)
    end = reports.ended()
    assert reports.lines == [b"first"]
    assert not isinstance(end.error, errors.Unauthorized)


def test_100_000_lines_come_once_and_in_order_over_three_cuts(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(log_follower, "SKIPPED_FILE_S", LIMIT_S)  # a pause of a busy machine is no lost file
    wire, api = parts.wired()
    block = "seq $((i*1000)) $((i*1000+999)); i=$((i+1)); sleep 0.1"
    gate = "until [ -e /tmp/go-$i ]; do sleep 0.1; done"  # after each cut, and at the end: all that is cut goes on
    ref = parts.pod(f"i=0; while [ $i -lt 100 ]; do {block}; case $i in *[27]5|50|100) {gate};; esac; done")
    _, reports = parts.follow(api, ref)
    for number in (25, 50, 75):
        reports.until(lambda report, line=(number - 20) * 1000: int(getattr(report, "line", 0)) >= line)
        wait_for(wire.cut)
        parts.go(ref, f"/tmp/go-{number}")
    parts.go(ref, "/tmp/go-100")
    end = reports.ended()
    assert reports.lines == [b"%d" % number for number in range(100_000)]
    assert end.complete
    assert (tmp_path / "pod.log").read_bytes() == b"".join(line + b"\n" for line in reports.lines)


def test_lines_beyond_16_kib_come_whole(parts):
    sizes = (16_383, 16_384, 16_385, 32_768, 100_000, 1_000_000)
    script = "; ".join(f"head -c {size} /dev/zero | tr '\\0' x; echo" for size in sizes)
    _, reports = parts.follow(parts.api, parts.pod(f"echo begin; {script}; printf end"))
    end = reports.ended()
    assert [len(line) for line in reports.lines] == [5, *sizes, 3]
    assert set(reports.lines[-2]) == {ord("x")}
    assert end.complete


def test_a_log_of_50_mb_comes_whole(parts, tmp_path):
    # What was rotated away before anybody read is lost without a trace, so a reader is there before the flood begins.
    ref = parts.pod(f"echo begin; until [ -e /tmp/go ]; do sleep 0.1; done; yes {'x' * 999} | head -n 50000")
    _, reports = parts.follow(parts.api, ref)
    reports.until(lambda report: isinstance(report, LogLine))
    parts.go(ref)
    end = reports.ended()
    assert (tmp_path / "pod.log").stat().st_size == sum(len(line) + 1 for line in reports.lines)
    # Runtimes rotate logs (kubelet: 10 MiB), and servers show what was not rotated away, beginning within a line: who reads
    # too slowly must know it.
    assert reports.lines == [b"begin", *[b"x" * 999] * 50_000] or not end.complete
    assert sum(line == b"x" * 999 for line in reports.lines) > 10_000


def test_standard_error_comes_too(parts):
    _, reports = parts.follow(parts.api, parts.pod("echo out; echo err >&2; printf 'no newline'"))
    assert reports.ended().complete
    # A runtime reads the two streams one beside the other: a log has no order between them.
    assert sorted(reports.lines) == [b"err", b"no newline", b"out"]


def test_pods_are_followed_to_their_end_with_few_requests(parts):
    ref = parts.pod("echo hello; until [ -e /tmp/go ]; do sleep 0.1; done; echo end")
    before = parts.api.requests
    follower, reported = parts.follow(parts.api, ref)
    reported.until(lambda report: isinstance(report, LogLine))
    follower.ended()  # a status that came after the log's end by seconds would be asked for
    parts.go(ref)
    assert reported.ended().complete
    assert reported.lines == [b"hello", b"end"]
    assert parts.api.requests - before == 2, "one to follow, one last look"
