"""The fixtures that tests ask for: ``system``, ``run``, ``baseline``, ``vetting``, ``allocation``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_mlhpc.errors import RunFailure
from pytest_mlhpc.session.bench import Bench, bench_of

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Target
    from pytest_mlhpc.session.allocation import Allocation, Vetting
    from pytest_mlhpc.session.run import Baseline, Run


@pytest.fixture
def system(request: pytest.FixtureRequest) -> Target:
    """Where the test runs: a partition with one of its environments (a parameter of every benchmark)."""
    _bench(request)
    pytest.fail("`system` is for benchmarks: decorate the test, as by @train('cosmoflow')", pytrace=False)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The measured and judged run: ``run["loss"].last``, ``run >= baseline``."""
    from pytest_mlhpc.session.run import Run
    from pytest_mlhpc.session.runtest import take

    return Run(take(request.node, _bench(request)))


@pytest.fixture
def baseline(request: pytest.FixtureRequest) -> Baseline:
    """The accepted values that the run is compared with: ``baseline["effective_throughput"]``."""
    from pytest_mlhpc.session.run import Baseline
    from pytest_mlhpc.session.runtest import take
    from pytest_mlhpc.store.record import Judgement, Verdict

    outcome = take(request.node, _bench(request))
    return Baseline(outcome.judgement or Judgement(Verdict.UNJUDGED))


@pytest.fixture
def vetting(request: pytest.FixtureRequest) -> Vetting:
    """What was found of the nodes of a test under ``@nodes(vet="quick")``: ``assert vetting.trouble("edac") == []``."""
    from pytest_mlhpc.session.allocation import Vetting
    from pytest_mlhpc.session.runtest import take

    outcome = take(request.node, _bench(request))
    if outcome.failure is not None:
        raise RunFailure(outcome.failure.outcome, outcome.failure.text)
    if outcome.vetting is None:
        pytest.fail(
            "`vetting` is for tests whose nodes are vetted: @nodes(count=4, vet='quick')", pytrace=False
        )
    return Vetting(outcome.vetting)


@pytest.fixture
def allocation(request: pytest.FixtureRequest) -> Iterator[Allocation]:
    """The nodes that a test under ``@nodes(...)`` holds while it runs: ``allocation.run(["hostname"]).stdout``."""
    from pytest_mlhpc.session.allocation import Allocation
    from pytest_mlhpc.session.runtest import take

    bench, node_id = _bench(request), request.node.nodeid
    spec = bench.specs.get(node_id)
    if spec is None or not spec.holds_nodes:
        text = "`allocation` is for tests that hold nodes: decorate this one by @nodes(count=2, time_limit='10m')"
        pytest.fail(text, pytrace=False)
    outcome = take(request.node, bench)
    if outcome.failure is not None:
        raise RunFailure(outcome.failure.outcome, outcome.failure.text)
    assert outcome.granted is not None and bench.source is not None  # noqa: S101, PT018 - as such an outcome is made
    source = bench.source
    mine = Allocation(outcome.granted, lambda: source.lost(node_id))
    yield mine
    mine.close()


def _bench(request: pytest.FixtureRequest) -> Bench:
    bench = bench_of(request.config)
    if bench is None:
        pytest.skip("a benchmark; to run it, pass --system NAME")
    if bench.source is None:
        pytest.skip("benchmarks do not run with --collect-only, --setup-only and --setup-plan")
    return bench
