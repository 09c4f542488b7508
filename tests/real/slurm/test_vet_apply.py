"""Draining what vetting found unfit, and resuming what was ours, on a real Slurm; and the lists as its commands read them."""

import fcntl
import os
import re
import shutil
import sys

import pytest
from services import wait_until

from pytest_mlhpc.node.vet.finding import Exit, Finding, Fitness, NodeVerdict, Origin, Severity, VetVerdict
from pytest_mlhpc.node.vet.verdict_files import prepare
from pytest_mlhpc.provision.slurm.commands import CliClient
from pytest_mlhpc.vetting.cordon import SlurmNodes, apply, is_ours, undo

pytestmark = pytest.mark.servers

#: No other test has jobs there.
NODE = "gpu2"
WORDS = """row remap failure on it's "bank" 3; State=DOWN Reason=x [root@now]"""


def unfit(host=NODE, text=WORDS, origin=Origin.NODE):
    finding = Finding("nvidia_memory", Severity.CRITICAL, text, "gpu1", origin=origin)
    return NodeVerdict(host, Fitness.UNFIT, f"[{origin.value}] {text}", (finding,))


def verdict(*nodes):
    exclude = tuple(node.host for node in nodes)
    good = tuple(host for host in ("node1", "node2", "node3", "node4") if host not in exclude)
    fit = tuple(NodeVerdict(host, Fitness.FIT) for host in good)
    return VetVerdict(Exit.READY, 1, (*nodes, *fit), good, exclude)


@pytest.fixture
def keeper(slurm):
    """The shared cluster, of which one node is used here, by one test at a time; it is given back whatever happens."""
    with (slurm.directory / f"{NODE}.tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield SlurmNodes(CliClient())
        if "drain" in state(slurm):
            slurm.run("scontrol", "update", f"nodename={NODE}", "state=resume")


def state(slurm):
    """Return the node's state, without the mark that a busy machine's slurmd has not answered for a moment."""
    return slurm.run("sinfo", "-h", "-N", "-n", NODE, "-o", "%T").stdout.split()[0].rstrip("*")


def reason(slurm):
    return slurm.run("sinfo", "-h", "-n", NODE, "-o", "%E").stdout.strip().splitlines()[0]


def drain(slurm, words):
    done = slurm.run("scontrol", "update", f"nodename={NODE}", "state=drain", f"reason={words}")
    assert done.returncode == 0, done.stderr


def usable(slurm):
    """Wait until Slurm may use the node: it clears the flag a moment after the answer."""
    return wait_until(lambda: "drain" not in state(slurm))


def test_a_node_problem_drains_the_node_with_its_reason_and_undo_resumes_it(slurm, keeper):
    (done,) = apply(verdict(unfit()), keeper)
    assert (done.host, done.outcome) == (NODE, "changed")
    assert state(slurm).startswith("drain")
    said = reason(slurm)
    assert said.startswith("[node_problem] mlhpc: nvidia_memory gpu1: row remap failure on it's 'bank' 3")
    assert is_ours(NODE, said)
    assert keeper.ours() == [NODE]
    (back,) = undo([], keeper)
    assert (back.host, back.outcome, back.text) == (NODE, "changed", "resumed")
    assert usable(slurm)


def test_a_node_that_an_administrator_drained_is_touched_by_neither(slurm, keeper):
    drain(slurm, "rack is rewired")
    (done,) = apply(verdict(unfit()), keeper)
    (back,) = undo([NODE], keeper)
    assert (done.outcome, back.outcome) == ("left", "left")
    assert re.fullmatch(r"already idle\+drain\S*: rack is rewired", done.text)
    assert re.fullmatch(r"drained by another user: idle\+drain\S*: rack is rewired", back.text)
    assert (state(slurm), reason(slurm)) == ("drained", "rack is rewired")


@pytest.mark.parametrize("change", ["{}; waits for a part", "ticket 7: {}", "[node_problem] mlhpc: mine now"])
def test_a_drain_of_ours_that_an_administrator_took_over_is_theirs(slurm, keeper, change):
    apply(verdict(unfit()), keeper)
    theirs = change.format(reason(slurm))
    drain(slurm, theirs)
    (back,) = undo([NODE], keeper)
    assert (back.outcome, reason(slurm)) == ("left", theirs)
    assert undo([], keeper) == []
    assert state(slurm) == "drained"


def test_a_node_that_went_down_after_we_drained_it_is_not_resumed(slurm, keeper):
    apply(verdict(unfit()), keeper)
    ours = reason(slurm)
    slurm.run("scontrol", "update", f"nodename={NODE}", "state=down", f"reason={ours}")
    try:
        (back,) = undo([NODE], keeper)
        assert (back.outcome, back.text.startswith(("more than drained: down", "not drained, but down"))) == (
            "left",
            True,
        )
    finally:
        slurm.run("scontrol", "update", f"nodename={NODE}", "state=resume")


def test_a_node_that_slurm_does_not_know_is_named(keeper):
    (done,) = apply(verdict(unfit("nope")), keeper)
    (back,) = undo(["nope"], keeper)
    assert str(done) == str(back) == "nope: FAILED: Slurm knows no node of this name"


def test_a_controller_that_does_not_answer_is_reported_for_each_node(tmp_path, monkeypatch):
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    (done,) = apply(verdict(unfit()), SlurmNodes(CliClient(limit_s=600.0)))
    assert done.outcome == "failed"
    assert "scontrol" in done.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without rights")
def test_a_user_who_may_not_drain_gets_slurms_message(slurm, keeper, tmp_path):
    scontrol = tmp_path / "scontrol"
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    scontrol.write_text(f'#!/bin/sh\nexec {nobody} {shutil.which("scontrol")} "$@"\n')
    scontrol.chmod(0o755)
    client = CliClient({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    (done,) = apply(verdict(unfit()), SlurmNodes(client))
    assert str(done).startswith(f"{NODE}: FAILED: slurm_update error: ")
    assert f"scontrol update NodeName={NODE} State=DRAIN" in done.text
    assert not state(slurm).startswith("drain")


# --- the lists, as srun reads them


def test_srun_takes_what_env_sh_sets_also_when_nothing_is_excluded(slurm, tmp_path):
    """An empty exclude.txt would not do: srun ends with "Hostlist is empty!"."""
    prepare(tmp_path / "vet").write(verdict())
    line = '. vet/env.sh; exec srun -p cpu -N1 -t 1 ${MLHPC_EXCLUDE:+--exclude="$MLHPC_EXCLUDE"} sh -c "echo $MLHPC_MASTER_ADDR"'
    done = slurm.run("sh", "-c", line, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "node1"), done.stderr


# --- as commands


def mlhpc(slurm, *words):
    return slurm.run(sys.executable, "-m", "pytest_mlhpc.cli", "vet", *words)


def test_a_verdict_is_applied_and_undone_by_commands(slurm, keeper, tmp_path):
    prepare(tmp_path / "vet").write(verdict(unfit(text="no more")))
    done = mlhpc(slurm, "drain", tmp_path / "vet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"{NODE}: drained: [node_problem] mlhpc: nvidia_memory gpu1: no more (mlhpc "
    )
    again = mlhpc(slurm, "drain", tmp_path / "vet")
    assert (again.returncode, "left as it is: already" in again.stdout) == (0, True)
    back = mlhpc(slurm, "undo")
    assert (back.returncode, back.stdout, back.stderr) == (0, f"{NODE}: resumed\n", "")
    assert usable(slurm)
    none = mlhpc(slurm, "undo")
    assert (none.returncode, none.stdout) == (0, "no node is out of service by us: nothing to do\n")
    unknown = mlhpc(slurm, "undo", "nope")
    assert (unknown.returncode, unknown.stderr) == (1, "nope: FAILED: Slurm knows no node of this name\n")
