"""Watches and logs while servers die and come back: on a cluster of the test's own, which it breaks."""

from __future__ import annotations

import pytest
from api_parts import Parts, config_map
from running_suites import wait_for

from pytest_mlhpc.provision.kubernetes import errors
from pytest_mlhpc.provision.kubernetes.logs import LogLine, LogTrouble
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, ref_of
from pytest_mlhpc.provision.kubernetes.watch import Healed, Seen, Synced, Trouble


@pytest.fixture
def parts(own_kubernetes, namespace, tmp_path):
    found = Parts(own_kubernetes, namespace, tmp_path)
    yield found
    found.close()


def test_a_server_that_restarts_in_the_middle_loses_no_event_and_no_line(parts, own_kubernetes):
    ref = parts.pod("i=0; while [ ! -e /tmp/go ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo end")
    _, told = parts.follow(parts.api, ref)
    told.until(lambda report: isinstance(report, LogLine))
    wire, wired = parts.wired()
    vanishing = ref_of(CONFIG_MAP, parts.api.create(CONFIG_MAP, config_map("vanishing")))
    forgotten = parts.watch(wired, CONFIG_MAP, "of=test")
    reports = parts.watch(parts.api, CONFIG_MAP, "of=test")
    for one in (forgotten, reports):
        one.seen("vanishing")
        one.until(lambda report: isinstance(report, Synced))
    # One watcher is cut off, so that the restarted server no longer knows what it missed: 410.
    wire.blocked = True
    wait_for(wire.cut)
    parts.api.delete(vanishing)
    parts.api.create(CONFIG_MAP, config_map("later"))
    reports.seen("later")

    own_kubernetes.kill("kube-apiserver")
    trouble = reports.until(lambda report: isinstance(report, Trouble))
    assert isinstance(trouble.error, errors.Unavailable)
    with pytest.raises(errors.Unavailable, match="Connection refused"):
        parts.api.version()
    own_kubernetes.start("kube-apiserver")

    reports.until(lambda report: isinstance(report, Healed))
    parts.api.create(CONFIG_MAP, config_map("after"))
    reports.seen("after")
    wire.blocked = False
    forgotten.vanished("vanishing")
    forgotten.until(lambda report: isinstance(report, Synced))
    names = [report.object["metadata"]["name"] for report in forgotten.all if isinstance(report, Seen)]
    assert names[-2:] == ["after", "later"]
    assert sum(isinstance(report, Synced) for report in forgotten.all) == 2, "it listed anew"
    parts.go(ref)
    end = told.ended()
    assert told.lines == [*[b"%d" % number for number in range(len(told.lines) - 1)], b"end"]
    assert end.complete


@pytest.mark.slow
def test_a_kubelet_that_is_killed_in_the_middle_of_a_log_loses_no_line(parts, own_kubernetes):
    ref = parts.pod("i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); sleep 0.1; done")
    _, told = parts.follow(parts.api, ref)
    told.until(lambda report: getattr(report, "line", b"") == b"20")
    own_kubernetes.kill("kubelet")
    told.until(lambda report: isinstance(report, LogTrouble))
    own_kubernetes.start("kubelet")
    end = told.ended()
    assert end.complete, end
    # Not all 200, should the kubelet have ended what it found when it came back.
    lines = list(parts.api.logs(ref, "main", follow=False, since=""))
    assert told.lines == [line.split(b" ", 1)[1] for line in lines]
    assert len(lines) > 21


@pytest.mark.slow  # that of 50 MB is rotated too
def test_a_log_that_is_rotated_while_it_is_followed_is_whole_or_said_not_to_be(
    start_own_kubernetes, tmp_path
):
    cluster = start_own_kubernetes("--log-max-size", "1Mi", "--log-files", "2")
    parts = Parts(cluster, cluster.make_namespace(), tmp_path)
    try:
        # 4 MB over half a minute: the kubelet looks at the sizes of logs every ten seconds.
        script = f"i=0; while [ $i -lt 400 ]; do yes {'x' * 99} | head -n 100; echo $i; i=$((i+1)); sleep 0.08; done"
        ref = parts.pod(script)
        _, told = parts.follow(parts.api, ref)
        end = told.ended()
    finally:
        parts.close()
    numbers = [int(line) for line in told.lines if not line.startswith(b"x")]
    assert numbers == sorted(set(numbers)), "in order and once"
    assert numbers[-1] == 399, "the end is there, so are results that are printed there again"
    whole = len(told.lines) == 400 * 101
    assert whole or not end.complete
