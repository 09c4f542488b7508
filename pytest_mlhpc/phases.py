"""The phases of a marked test: its run is awaited in setup, and judged around the call whatever its body does."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Generator

import pytest

from pytest_mlhpc.bench import Bench
from pytest_mlhpc.errors import InfrastructureError, RunFailure
from pytest_mlhpc.judge.verdict import Judgement, Verdict
from pytest_mlhpc.options import folder_options
from pytest_mlhpc.results import junit
from pytest_mlhpc.results.outcome import Outcome
from pytest_mlhpc.results.run import WARNINGS, WORSE, explain
from pytest_mlhpc.terminal import live_of

OUTCOME = pytest.StashKey[Outcome]()

#: Attribute of reports (it travels to the controller of pytest-xdist) of errors that are the infrastructure's.
INFRA_ATTRIBUTE = "mlhpc_infrastructure"

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
            pytest.fail("this test declares no run: mark it train or job", pytrace=False)
        assert bench.source is not None  # noqa: S101 - tests run, so there is one
        live = live_of(item.config)
        try:
            outcome = bench.source.wait(item.nodeid, live.tick if live else None)
        finally:
            if live:
                live.clear()
        item.stash[OUTCOME] = outcome
        item.user_properties.extend(junit.properties(outcome))
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
        if outcome.judgement is not None:
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
    return RunFailure(judgement.verdict.value, "\n".join(explain(judgement)))


def finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, bench: Bench
) -> None:
    """Give a failed report our text instead of a traceback of our own, and the command that repeats the test."""
    if item.nodeid not in bench.specs or not report.failed:
        return
    error = call.excinfo.value if call.excinfo else None
    if call.excinfo is not None and isinstance(error, (RunFailure, InfrastructureError)):
        report.longrepr = call.excinfo.getrepr(style="value")
    if isinstance(error, InfrastructureError):
        setattr(report, INFRA_ATTRIBUTE, True)
    outcome = item.stash.get(OUTCOME, None)
    told = isinstance(error, (RunFailure, InfrastructureError))
    if (
        outcome is not None
        and outcome.judgement is not None
        and outcome.judgement.verdict in WORSE
        and not told
    ):
        report.sections.append(("why", "\n".join(explain(outcome.judgement)) + "\n"))
    report.sections.append(("mlhpc", f"to repeat just this test: {repeat_command(item, bench)}\n"))


def repeat_command(item: pytest.Item, bench: Bench) -> str:
    """Return the shell command that runs *item* again on the same target."""
    settings, target = bench.settings, bench.specs[item.nodeid].target
    path, separator, rest = item.nodeid.partition("::")
    path = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir)
    words = ["pytest", path + separator + rest, "--system", target.partition.id]
    if len(target.partition.environments) > 1 or settings.environment:
        words += ["--environment", target.environment.name]
    if settings.systems_file:
        # In two words, pytest could take the file for a path of tests.
        words.append(f"--systems-file={settings.systems_file}")
    if settings.preset:
        words += ["--preset", settings.preset]
    words += [f"--set={name}={value}" for name, value in settings.overrides.items()]
    if target.node:
        words.append(f"--each-node={target.node}")
    if settings.here:
        words.append("--here")
    words += folder_options(settings, item.config.rootpath / "baselines")
    return shlex.join(words)
