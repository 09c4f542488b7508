"""Builds for runs on several pods, which see no folder of each other: whole in each, or an error that names the pod."""

from dataclasses import replace

import pytest
from pods import both

from pytest_mlhpc.node.protocol.plan import BuildPlan

pytestmark = pytest.mark.servers

P1 = "p-1 (node node1)"


def needing(script, name, **changes):
    """Return a run on two pods that needs a build by *script*, and what is built."""
    build = BuildPlan("tool", f"key-{name}", ("sh", "-c", script))
    return both("cat $TOOL/made", name, builds=(build,), variables={"TOOL": "{tool}"}, **changes)


@pytest.fixture(scope="module")
def builders(module_pods):
    """Return two pods that have built, or could not, what their runs need."""
    once = replace(
        needing("echo in $MLHPC_NODE > made", "tool"), run_id="once", nodes=1, ranks=1, launcher="plain"
    )
    made = module_pods(
        once,
        needing("echo in $MLHPC_NODE > made", "tool"),
        needing("echo again > made", "again"),
        replace(needing("exit 9", "again"), run_id="later"),
        needing('[ $RANK = 0 ] && exec sleep 600; echo "tool.c: no such type" >&2; exit 2', "breaks"),
        needing("[ $RANK = 1 ] || echo > made", "idle"),
        needing("kill -9 $$", "killed"),
        replace(needing("", "no-compiler"), builds=(BuildPlan("tool", "key-cc", ("no-such-cc",)),)),
        pods=2,
    )  # fmt: skip
    made.start()
    assert made.ends() == {0: 0, 1: 0}
    return made


def test_what_ranks_on_several_pods_need_is_built_in_each_of_them(builders):
    """A run that is started in the first pod alone had it built there before."""
    assert builders.output("once", "rank0").read_text() == "in p-0 (node node0)\n"
    for pod in (0, 1):
        assert (
            builders.work(pod) / "builds" / "key-tool" / "made"
        ).read_text() == f"in p-{pod} (node node{pod})\n"


def test_what_is_built_in_all_pods_is_built_once(builders):
    assert [kind for run, kind in builders.kinds() if run in {"again", "later"}] == ["started", "end"] * 2
    assert (builders.work(1) / "builds" / "key-again" / "made").read_text() == "again\n"


def test_a_build_that_fails_in_one_pod_names_it_and_what_its_compiler_said(builders):
    text = 'the build tool (sh -c [ $RANK = 0 ] && exec sleep 600; echo "tool.c: no such type" >&2; exit 2)'
    assert builders.failure("breaks") == {
        "outcome": "build_failed", "log": "",
        "text": f"{text}: ended with exit code 2 on {P1}; its last lines:\ntool.c: no such type",
    }  # fmt: skip
    assert not list((builders.work(0) / "builds").glob("key-breaks*"))


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("idle", f"ended with exit code 1 on {P1}; its last lines:\nthe build tool (sh -c [ $RANK = 1 ] || echo > made) wrote nothing into its folder"),
        ("killed", "the build tool (sh -c kill -9 $$): was killed by SIGKILL"),
        ("no-compiler", "cannot start 'no-such-cc': No such file or directory"),
    ],
)  # fmt: skip
def test_a_build_that_makes_nothing_in_a_pod_says_why(builders, run, text):
    failure = builders.failure(run)
    assert failure["outcome"] == "build_failed"
    assert text in failure["text"]
