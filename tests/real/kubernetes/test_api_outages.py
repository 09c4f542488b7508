"""Watches and logs while servers die and come back: on a cluster of the test's own, which it breaks."""

import pytest
from api_parts import CONFIG_MAP, Parts, config_map
from running_suites import wait_for

from pytest_mlhpc.provision.kubernetes import errors
from pytest_mlhpc.provision.kubernetes.log_follower import LogLine
from pytest_mlhpc.provision.kubernetes.objects import object_ref
from pytest_mlhpc.provision.kubernetes.watch import ListSynced, ObjectChanged, WatchFailing, WatchRecovered


@pytest.fixture
def parts(own_kubernetes, namespace, tmp_path):
    found = Parts(own_kubernetes, namespace, tmp_path)
    yield found
    found.close()


@pytest.mark.long
def test_a_server_that_restarts_in_the_middle_loses_no_event_and_no_line(parts, own_kubernetes):
    ref = parts.pod("i=0; while [ ! -e /tmp/go ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo end")
    _, reported = parts.follow(parts.api, ref)
    reported.until(lambda report: isinstance(report, LogLine))
    wire, wired = parts.wired()
    vanishing = object_ref(CONFIG_MAP, parts.api.create(CONFIG_MAP, config_map("vanishing")))
    forgotten = parts.watch(wired, CONFIG_MAP, "of=test")
    reports = parts.watch(parts.api, CONFIG_MAP, "of=test")
    for one in (forgotten, reports):
        one.changed("vanishing")
        one.until(lambda report: isinstance(report, ListSynced))
    # One watcher is cut off, so that the restarted server no longer knows what it missed: 410.
    wire.blocked = True
    wait_for(wire.cut)
    parts.api.delete(vanishing)
    parts.api.create(CONFIG_MAP, config_map("later"))
    reports.changed("later")

    own_kubernetes.kill("kube-apiserver")
    trouble = reports.until(lambda report: isinstance(report, WatchFailing))
    assert isinstance(trouble.error, errors.Unavailable)
    with pytest.raises(errors.Unavailable, match="Connection refused"):
        parts.api.version()
    own_kubernetes.start("kube-apiserver")

    reports.until(lambda report: isinstance(report, WatchRecovered))
    parts.api.create(CONFIG_MAP, config_map("after"))
    reports.changed("after")
    wire.blocked = False
    forgotten.deleted("vanishing")
    forgotten.until(lambda report: isinstance(report, ListSynced))
    names = [
        report.object["metadata"]["name"] for report in forgotten.all if isinstance(report, ObjectChanged)
    ]
    assert names[-2:] == ["after", "later"]
    assert sum(isinstance(report, ListSynced) for report in forgotten.all) == 2, "it listed anew"
    parts.go(ref)
    end = reported.ended()
    assert reported.lines == [*[b"%d" % number for number in range(len(reported.lines) - 1)], b"end"]
    assert end.complete
