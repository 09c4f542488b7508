"""Which nodes leave service, under which reason, and how an untouched one is known again."""

import json

import pytest

from pytest_mlhpc.cli import main
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.vet.finding import Exit, Finding, Fitness, NodeVerdict, Origin, Severity, VetVerdict
from pytest_mlhpc.node.vet.judge import PRESENCE
from pytest_mlhpc.node.vet.verdict_files import prepare
from pytest_mlhpc.vetting.cordon import (
    Action,
    apply,
    fresh,
    is_ours,
    node_admin_of,
    node_problems,
    print_actions,
    sealed,
    undo,
)


def finding(severity=Severity.CRITICAL, origin=Origin.NODE, reason="row remap failure"):
    return Finding("memory", severity, reason, "gpu3", origin=origin)


def missing(reason="it never came"):
    """What the judge says of a node that did not say all."""
    return Finding(PRESENCE, Severity.CRITICAL, reason, rule=PRESENCE)


def node(host, *findings, fitness=Fitness.UNFIT, reason=""):
    return NodeVerdict(host, fitness, reason, findings)


def verdict(*nodes, exclude=None):
    hosts = tuple(one.host for one in nodes)
    return VetVerdict(Exit.TOO_FEW, 1, nodes, (), hosts if exclude is None else exclude)


class Recorder:
    """A scheduler that does what it is told."""

    name = "recorder"

    def __init__(self, *ours):
        self.taken, self.given = {}, []
        self.ours = lambda: list(ours)

    def take_out(self, host, reason):
        self.taken[host] = reason
        return Action("changed", host, "out")

    def give_back(self, host):
        self.given.append(host)
        return Action("changed", host, "in")


def test_a_sealed_reason_is_known_again_for_its_node_alone():
    reason = sealed("node1", "gpu3: row remap failure")
    assert reason.startswith("[node_problem] mlhpc: gpu3: row remap failure (mlhpc ")
    assert (is_ours("node1", reason), is_ours("node2", reason)) == (True, False)


@pytest.mark.parametrize(
    ("change", "ours"),
    [("{} ", True), (" {}", True), ("{} wait", False), ("ticket {}", False), ("{0}{0}", False), ("", False)],
)
def test_it_is_ours_but_for_blanks_around_it_only_as_it_was(change, ours):
    reason = sealed("node1", "gpu3 is slow")
    assert is_ours("node1", change.format(reason)) is ours
    assert not is_ours("node1", reason.replace("gpu3", "gpu4"))


def test_only_unfit_nodes_with_a_problem_of_their_own_leave_service():
    nodes = (
        node("bad", finding(origin=Origin.USER, reason="no space"), finding()),
        node("user", finding(origin=Origin.USER), reason="[user_problem] no space"),
        node("unknown", finding(Severity.UNKNOWN), fitness=Fitness.UNKNOWN, reason="[node_problem] closed"),
        node("warned", finding(Severity.WARNING), fitness=Fitness.FIT, reason="[node_problem] slow"),
        node("silent", missing()),
        node("hung", missing(), Finding("edac", Severity.CRITICAL, "it hung")),
        node("kept", finding()),
    )
    found = node_problems(verdict(*nodes, exclude=("bad", "user", "unknown", "silent", "hung")))
    assert found == {"bad": "memory gpu3: row remap failure", "hung": "edac: it hung"}


NOTHING_FOUND = "no check has found anything wrong with it, and that may be its user's own doing"


NEVER_CAME = f"silent: left as it is: {NOTHING_FOUND}: it never came"


def test_a_node_that_only_never_came_stays_in_service_and_that_is_said():
    admin = Recorder()
    user = node("user", finding(origin=Origin.USER))
    _, silent = apply(verdict(node("bad", finding()), node("silent", missing()), user), admin)
    assert (list(admin.taken), str(silent)) == (["bad"], NEVER_CAME)


def test_a_pods_node_leaves_service_by_its_own_name():
    assert list(node_problems(verdict(node("job-0 (node gpu7)", finding())))) == ["gpu7"]


def test_more_than_a_third_of_the_nodes_is_no_problem_of_nodes_and_nothing_is_done():
    bad = [node(f"bad{index}", finding()) for index in range(3)]
    good = [node(f"good{index}", fitness=Fitness.FIT) for index in range(5)]
    admin, given = Recorder(), verdict(*bad, *good, exclude=("bad0", "bad1", "bad2"))
    actions = apply(given, admin)
    assert ({action.outcome for action in actions}, admin.taken) == ({"left"}, {})
    assert "3 of 8 nodes have a problem, more than 2: nothing was changed" in actions[0].text
    assert [action.outcome for action in apply(given, admin, most=3)] == ["changed"] * 3
    assert tuple(admin.taken) == given.exclude


def test_a_single_node_may_be_taken_out():
    admin = Recorder()
    apply(verdict(node("bad", finding())), admin)
    assert is_ours("bad", admin.taken["bad"])


def test_undo_asks_for_each_node_once_and_without_names_for_all_of_ours():
    admin = Recorder("a", "b")
    undo(["c", "d", "c"], admin)
    undo([], admin)
    assert admin.given == ["c", "d", "a", "b"]


def test_what_was_done_is_told_and_a_failure_on_standard_error(capsys):
    assert print_actions([Action("changed", "a", "out"), Action("left", "b", "mine\x1b")])
    assert not print_actions([Action("failed", "c", "no right")])
    assert capsys.readouterr() == ("a: out\nb: left as it is: mine?\n", "c: FAILED: no right\n")


def test_where_there_is_no_scheduler_that_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"neither Slurm .* nor Kubernetes"):
        node_admin_of("auto", {"PATH": str(tmp_path)})


def test_a_folder_without_a_verdict_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"verdict\.json: cannot be read"):
        fresh(tmp_path)


def test_a_verdict_of_yesterday_takes_nobody_out(tmp_path):
    prepare(tmp_path).write(verdict(node("bad", finding())), now_ns=1)
    with pytest.raises(UsageError, match="hours old: vet again"):
        fresh(tmp_path)


NOTHING = "no node has a problem of its own: nothing to do"


@pytest.mark.parametrize(
    ("one", "lines"),
    [
        (node("good", fitness=Fitness.FIT), [NOTHING]),
        (node("silent", missing()), [NEVER_CAME, NOTHING]),
    ],
    ids=["good", "never came"],
)
def test_where_no_node_has_a_problem_no_scheduler_is_asked(tmp_path, monkeypatch, capsys, one, lines):
    monkeypatch.setenv("PATH", str(tmp_path))
    prepare(tmp_path / "vet").write(verdict(one))
    assert main(["vet", "drain", str(tmp_path / "vet")]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_a_scheduler_that_fails_is_exit_code_1(tmp_path, monkeypatch, capsys):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'Invalid user id' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    prepare(tmp_path / "vet").write(verdict(node("bad", finding())))
    assert main(["vet", "drain", str(tmp_path / "vet")]) == 1
    assert main(["vet", "undo", "bad"]) == 1
    assert capsys.readouterr().err.count("bad: FAILED: Invalid user id (exit code 1 of scontrol") == 2
    for verb, name in (("drain", str(tmp_path / "vet")), ("undo", "bad")):
        assert main(["vet", verb, name, "--json"]) == 1
        data = json.loads(capsys.readouterr().out)
        assert data["schema"] == f"mlhpc/vet-{verb}/1"
        assert [(one["node"], one["became"]) for one in data["nodes"]] == [("bad", "failed")]
