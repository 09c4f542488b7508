"""The fixtures that tests ask for: ``system``, ``run``, ``baseline``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_mlhpc.bench import Bench, bench_of

if TYPE_CHECKING:
    from pytest_mlhpc.results.run import Baseline, Run
    from pytest_mlhpc.system.model import Target


@pytest.fixture
def system(request: pytest.FixtureRequest) -> Target:
    """Where the test runs: a partition with one of its environments (a parameter of every marked test)."""
    _bench(request)
    pytest.fail("`system` is for tests that are marked train or job", pytrace=False)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The measured and judged run: ``run["loss"].last``, ``run >= baseline``."""
    from pytest_mlhpc.phases import take
    from pytest_mlhpc.results.run import Run

    return Run(take(request.node, _bench(request)))


@pytest.fixture
def baseline(request: pytest.FixtureRequest) -> Baseline:
    """The accepted values that the run is compared with: ``baseline["effective_throughput"]``."""
    from pytest_mlhpc.judge.verdict import Judgement, Verdict
    from pytest_mlhpc.phases import take
    from pytest_mlhpc.results.run import Baseline

    outcome = take(request.node, _bench(request))
    return Baseline(outcome.judgement or Judgement(Verdict.UNJUDGED))


def _bench(request: pytest.FixtureRequest) -> Bench:
    bench = bench_of(request.config)
    if bench is None:
        pytest.skip("a benchmark; to run it, pass --system NAME")
    if bench.source is None:
        pytest.skip("benchmarks do not run with --collect-only, --setup-only and --setup-plan")
    return bench
