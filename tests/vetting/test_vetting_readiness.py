"""What is kept of nodes over sessions: what pods' probes said keeps later jobs away, as what agents found does."""

import os
from dataclasses import replace

import pytest

from pytest_mlhpc.config.model import Vet
from pytest_mlhpc.jobs.job import Attempt
from pytest_mlhpc.jobs.plan import probe_verdict, run_plan, vetted_record
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Exit,
    Fitness,
    NodeReport,
    NodeVerdict,
    Reading,
    Report,
    VetVerdict,
)
from pytest_mlhpc.vetting.history import StoredVetting, keep
from pytest_mlhpc.vetting.reuse import Readiness

SAID = "[node_problem] numa is 2, 1 is described"


@pytest.fixture
def spec(command, target):
    vet = Vet(level="quick", unknown="warn")
    partition = replace(target.partition, scheduler="kubernetes", vet=vet)
    return command(on=replace(target, partition=partition))


@pytest.mark.parametrize(("scheduler", "own"), [("local", [100.0]), ("kubernetes", [])])
def test_this_machine_is_compared_with_its_own_earlier_figures(spec, tmp_path, scheduler, own):
    """Of nodes that a scheduler will choose, nobody knows the names yet."""
    here = replace(
        spec, target=replace(spec.target, partition=replace(spec.target.partition, scheduler=scheduler))
    )
    host, reading = os.uname().nodename, Reading("gemm", "gemm", "gemm/bf16", "H100", 100.0, "FLOP/s")
    report = Report((NodeReport(host, "boot", {"H100": 1}, (CheckOutcome(readings=(reading,)),)),))
    verdict = VetVerdict(Exit.NOT_COMPARED, 1, (NodeVerdict(host, Fitness.FIT),), (host,), ())
    keep(tmp_path, StoredVetting("first", verdict, report, VetSettings(), "sys", "part"))
    settings = Readiness(tmp_path, "second", []).settings(replace(here, workload="cosmoflow"))
    assert settings is not None
    assert [learned.median for learned in settings.learned if learned.host == host] == own


def probed(spec, unfit):
    """Return an attempt that was told of nodes that probes found unfit."""
    attempt = Attempt(run_plan(spec, 0), 0)
    tell(attempt, level="quick", seconds=0.0, fit=[], unfit=unfit, warnings={}, probed=unfit)
    return attempt


def tell(attempt, **body):
    attempt.receive(Message(attempt.run.run_id, attempt.run.nonce, "vetted", body))


@pytest.mark.parametrize(
    ("text", "problem"), [(SAID, SAID), ("torch did not answer", "[node_problem] torch did not answer")]
)
def test_a_node_that_a_probe_found_unfit_is_kept_out_of_the_next_session(spec, tmp_path, text, problem):
    trouble: list[str] = []
    Readiness(tmp_path, "first", trouble).keep(spec, probed(spec, {"n1": text}))
    assert Readiness(tmp_path, "second", trouble).excluded(spec) == {"n1": problem}
    assert trouble == []


def test_nothing_is_kept_where_nothing_is_vetted(command, tmp_path):
    off = command()
    Readiness(tmp_path, "first", []).keep(off, probed(off, {"n1": SAID}))
    assert not (tmp_path / "vetting").exists()


def test_a_policy_file_that_went_meanwhile_is_told_and_ends_nothing(spec, tmp_path):
    partition = spec.target.partition
    gone = replace(partition, vet=replace(partition.vet, policy=str(tmp_path / "gone.toml")))
    trouble: list[str] = []
    one = replace(spec, target=replace(spec.target, partition=gone))
    Readiness(tmp_path, "first", trouble).keep(one, probed(one, {"n1": SAID}))
    (problem,) = trouble
    assert problem.startswith("what vetting found cannot be stored: ")
    assert "gone.toml" in problem


def test_what_the_agents_say_later_leaves_what_the_probes_said(spec):
    attempt = probed(spec, {"n1": SAID})
    tell(attempt, level="quick", seconds=9.0, fit=["n2"], unfit={}, warnings={})
    found = vetted_record(attempt)
    assert found is not None
    assert (found.fit, dict(found.unfit), found.seconds) == (("n2",), {"n1": SAID}, 9.0)
    kept = probe_verdict(attempt)
    assert kept is not None
    assert kept.exclude == ("n1",)


@pytest.mark.parametrize("body", [{}, {"probed": {}}, {"probed": ["n1"]}, {"probed": None}])
def test_without_unfit_nodes_there_is_no_verdict_of_probes(spec, body):
    attempt = Attempt(run_plan(spec, 0), 0)
    tell(attempt, level="quick", seconds=0.0, fit=[], unfit={}, warnings={}, **body)
    assert probe_verdict(attempt) is None
