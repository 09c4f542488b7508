"""The phases of a benchmark: its run is awaited in setup and judged around the call, and its reports carry properties for JUnit files.

Here, too, is the bridge to pytest-benchmark: with one of its options, every run is a row in its table, its JSON and its
comparisons. pytest-benchmark has no public call for a measurement that was made elsewhere; this uses one private attribute of
its plug-in (``config._benchmarksession``) and does nothing where that is not there. Judging stays ours.
"""

from __future__ import annotations

import os
import shlex
import types
import warnings
from collections.abc import Generator
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr

from pytest_mlhpc.errors import InfrastructureError, RunFailure, SpecError
from pytest_mlhpc.jobs.job import Job, Outcome
from pytest_mlhpc.options import options_of_target, repeated_options
from pytest_mlhpc.session.bench import INFRA_ATTRIBUTE, Bench
from pytest_mlhpc.session.live import live_of
from pytest_mlhpc.session.run import WARNINGS, explain
from pytest_mlhpc.store.verdict import WORSE, Judgement, Verdict


def properties(outcome: Outcome) -> list[tuple[str, object]]:
    """Return benchmark, run id, verdict, and each metric as ``mlhpc.metric.NAME`` with its unit."""
    found: list[tuple[str, object]] = [
        ("mlhpc.benchmark", outcome.benchmark),
        ("mlhpc.run", outcome.record_id),
        ("mlhpc.attempts", outcome.attempts),
    ]
    if outcome.failure is not None:
        found.append(("mlhpc.failure", outcome.failure.outcome))
    if outcome.judgement is not None:
        found.append(("mlhpc.verdict", outcome.judgement.verdict.value))
    for one in outcome.comparison:
        result = one.result
        bounds = f"{result.change:.6g} [{result.low:.6g}, {result.high:.6g}]"
        found.append((f"mlhpc.against.{one.metric}", f"{result.verdict.value} {bounds}"))
    if outcome.vetting is not None:
        found.append(("mlhpc.fit", ",".join(outcome.vetting.good)))
        found.append(("mlhpc.unfit", ",".join(outcome.vetting.exclude)))
    if outcome.granted is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.granted.nodes)))
    if outcome.measurement is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.measurement.nodes)))
        found.extend(
            (f"mlhpc.metric.{metric.name}", f"{metric.value!r} {metric.unit}")
            for metric in outcome.measurement.metrics
        )
    return found


OUTCOME = pytest.StashKey[Outcome]()

#: Only a session that is about to end gives up the run of a test that still asks for it (cancelled, detached); and a device
#: whose compiler cannot take a workload says nothing against either.
_SKIPPED = frozenset({"cancelled", "detached", "cannot_lower"})


def take(item: pytest.Item, bench: Bench) -> Outcome:
    """Wait for the run of *item* and return its outcome.

    Raises:
        InfrastructureError: no measurement could be made, and that is not the test's fault.
    """
    __tracebackhide__ = True
    outcome = item.stash.get(OUTCOME, None)
    if outcome is None:
        if item.nodeid not in bench.specs:
            pytest.fail("this test declares no run: decorate it, as by @train('cosmoflow')", pytrace=False)
        assert bench.source is not None  # noqa: S101 - tests run, so there is one
        live = live_of(item.config)
        try:
            outcome = bench.source.wait(item.nodeid, live.tick if live else None)
        finally:
            if live:
                live.clear()
        item.stash[OUTCOME] = outcome
        item.user_properties.extend(properties(outcome))
    if outcome.failure is not None and outcome.failure.outcome in _SKIPPED:
        pytest.skip(outcome.failure.text)
    if outcome.failure is not None and outcome.failure.infrastructure:
        failure = outcome.failure
        raise InfrastructureError(failure.outcome, str(failure).removeprefix(f"{failure.outcome}: "))
    return outcome


def around_call(item: pytest.Function, bench: Bench) -> Generator[None, object, object]:
    """Fail a test whose run was broken before its body runs, and one whose run was slow after it."""
    __tracebackhide__ = True
    outcome = take(item, bench)
    if outcome.failure is not None:
        failure = outcome.failure
        text = str(failure).removeprefix(f"{failure.outcome}: ")
        if outcome.judgement is not None and outcome.judgement.verdict is not Verdict.UNJUDGED:
            text = "\n".join([text, *explain(outcome.judgement)])
        raise RunFailure(failure.outcome, text)
    judgement = outcome.judgement or Judgement(Verdict.UNJUDGED)
    try:
        result = yield
    except (pytest.skip.Exception, pytest.xfail.Exception):
        if judgement.verdict in WORSE:
            raise _slow(judgement) from None  # a body that bows out does not hide what its run has shown
        raise
    if judgement.verdict in WORSE:
        raise _slow(judgement)
    if category := WARNINGS.get(judgement.verdict):
        with warnings.catch_warnings():
            # The test has passed: a project that turns warnings into errors still gets this one as a warning.
            warnings.simplefilter("always", category)
            item.warn(category("\n".join(explain(judgement))))
    return result


def _slow(judgement: Judgement) -> RunFailure:
    return RunFailure(judgement.verdict.value, "\n".join(explain(judgement)), whole=True)


def finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, bench: Bench
) -> None:
    """Give a failed report our text instead of a traceback of our own, and the command that repeats the test."""
    error = call.excinfo.value if call.excinfo else None
    if call.excinfo is not None and isinstance(error, (RunFailure, InfrastructureError, SpecError)):
        report.longrepr = _message_alone(call.excinfo)
    if item.nodeid not in bench.specs:
        return
    if isinstance(error, InfrastructureError):
        setattr(report, INFRA_ATTRIBUTE, True)
    outcome = item.stash.get(OUTCOME, None)
    expected = isinstance(error, (RunFailure, InfrastructureError))
    if (
        outcome is not None
        and outcome.judgement is not None
        and outcome.judgement.verdict in WORSE
        and not expected
    ):
        first, *_ = lines = explain(outcome.judgement)
        report.sections.append(("why", "\n".join(lines) + "\n"))
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and "run >= baseline" in str(error).partition("\n")[0]:
            crash.message = first
    report.sections.append(("mlhpc", f"to repeat just this test: {repeat_command(item, bench)}\n"))


def _message_alone(error: pytest.ExceptionInfo[BaseException]) -> TerminalRepr:
    """Return what pytest prints of *error*: its text, in the short summary too, without the name of its class."""
    shown = error.getrepr(style="value", chain=False)
    if shown.reprcrash is not None:
        problems = getattr(error.value, "problems", ())
        shown.reprcrash.message = problems[0].what if problems else str(error.value).partition("\n")[0]
    return shown


def repeat_command(item: pytest.Item, bench: Bench) -> str:
    """Return the shell command that runs *item* again on the same target."""
    settings, target = bench.settings, bench.specs[item.nodeid].target
    path, separator, rest = item.nodeid.partition("::")
    path = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir)
    argv = ["pytest", path + separator + rest, settings.system_option, target.partition.id]
    argv += (*options_of_target(settings, target), *repeated_options(settings, item.config.rootpath))
    return shlex.join(argv)


def add_row(config: pytest.Config, job: Job) -> None:
    """Add the run of *job* as one benchmark: its rounds are the slowest rank's step times, in seconds.

    A run without steps (`command`) is one round, as long as the program ran. A test that is run again
    (pytest-rerunfailures) has the same run, and no second row.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    outcome = job.outcome
    if benchmarks is None or outcome is None or outcome.measurement is None:
        return
    if any(row.fullname == job.spec.node_id for row in benchmarks.benchmarks[-1:]):
        return
    from pytest_benchmark.stats import Metadata

    measurement, spec = outcome.measurement, job.spec
    fixture = types.SimpleNamespace(
        name=spec.node_id.rpartition("::")[2],
        fullname=spec.node_id,
        group=spec.workload,
        param=spec.target.id,
        params={"system": spec.target.id, **{name: str(value) for name, value in spec.asked.items()}},
        extra_info=_extra_info(job),
        cprofile_stats=None,
        has_error=False,
    )
    row: Any = Metadata(fixture, iterations=1, options={"timer": "remote"})  # type: ignore[no-untyped-call]  # theirs
    whole = (measurement.ended_ns - measurement.started_ns) / 1e9
    for seconds in measurement.step_times_s or (whole,):
        row.update(seconds)
    benchmarks.benchmarks.append(row)


def add_machine(machine_info: dict[str, Any], bench: Bench) -> None:
    """Say where the figures were made: pytest-benchmark itself only knows the machine that pytest runs on."""
    machine_info["mlhpc"] = sorted(target.id for target in bench.targets)


def _extra_info(job: Job) -> dict[str, Any]:
    outcome = job.outcome
    if outcome is None or outcome.measurement is None:
        return {}
    return {
        "benchmark": outcome.benchmark,
        "run": outcome.record_id,
        "verdict": outcome.judgement.verdict.value if outcome.judgement else "",
        "device_model": outcome.measurement.device_model,
        "nodes": list(outcome.measurement.nodes),
        "metrics": {metric.name: metric.value for metric in outcome.measurement.metrics},
    }
