"""The hooks of pytest, in the order in which pytest calls them; each delegates.

Without ``--system`` nothing happens but that benchmarks are skipped. Modules are imported where they are used first:
an ordinary pytest run pays for this file and for the options alone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc import options
from pytest_mlhpc.errors import Problem, SpecError
from pytest_mlhpc.jobs.decorators import MARKER, declared_of, skip_declared
from pytest_mlhpc.session.bench import INFRA_ATTRIBUTE, Bench, activate, bench_of, offer, start_session
from pytest_mlhpc.session.fixtures import allocation, baseline, run, system, vetting

if TYPE_CHECKING:
    from pytest_mlhpc.session.session import BenchmarkSession

__all__ = ["allocation", "baseline", "run", "system", "vetting"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini values."""
    options.add(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Let ``--system`` be ours where all conftest files have left it free."""
    early_config.stash[options.ARGS] = tuple(args)
    known, here = early_config.known_args_namespace, early_config.invocation_params.dir
    known.file_or_dir = options.without_names(known.file_or_dir, args, here)
    result = yield
    options.add_short(parser, args)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Document the mark; with ``--system``, read what is needed to collect."""
    config.addinivalue_line("markers", MARKER)
    if hasattr(config, "workerinput"):
        from pytest_mlhpc.session.workers import activate_worker

        activate_worker(config)
    elif (settings := options.settings_of(config)).active:
        bench = activate(config, settings)
        config.pluginmanager.register(OwnerHooks(bench, config), "mlhpc_owner")
        if config.pluginmanager.hasplugin("xdist") or config.pluginmanager.hasplugin("xdist.plugin"):
            from pytest_mlhpc.session.workers import ControllerHooks

            config.pluginmanager.register(ControllerHooks(bench, config.option.maxfail or 0), "mlhpc_xdist")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by target before anything else, and let fields of the spec be parameters."""
    if (declared := declared_of(metafunc.definition)) is not None:
        from pytest_mlhpc.session import collection

        bench = bench_of(metafunc.config)
        collection.allow_fields(metafunc, declared, bench)
        if bench is not None:
            collection.parametrize_by_target(metafunc, bench)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip benchmarks if no system is selected."""
    if bench_of(config) is None:
        skip_declared(items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Resolve what the selected tests declare, and start submitting; with --collect-only alone, find what is wrong anywhere."""
    if (bench := bench_of(session.config)) is not None:
        from pytest_mlhpc.session import collection

        collection.finish(session, bench)
        if session.config.option.collectonly:
            session.config.pluginmanager.register(FaultHooks(bench.faults))
    elif session.config.option.collectonly and any(map(declared_of, session.items)):
        from pytest_mlhpc.session import collection

        session.config.pluginmanager.register(FaultHooks(collection.faults_anywhere(session)))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse a test that cannot run; after all fixtures, await the run of any other, whether it asked for it or not."""
    bench = bench_of(item.config)
    if bench is not None and (problems := bench.faults.get(item.nodeid)):
        raise SpecError(problems)
    result = yield
    if bench is not None and bench.source is not None and item.nodeid in bench.specs:
        from pytest_mlhpc.session.runtest import take

        take(item, bench)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a benchmark whose run was broken or slow, whatever its body does."""
    bench = bench_of(pyfuncitem.config)
    if bench is None or bench.source is None or pyfuncitem.nodeid not in bench.specs:
        return (yield)
    from pytest_mlhpc.session.runtest import around_call

    return (yield from around_call(pyfuncitem, bench))


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say in short why ``assert run >= baseline`` failed; pytest would cut the explanation, which has its own section."""
    if op != ">=" or type(left).__module__ != "pytest_mlhpc.session.run":
        return None
    from pytest_mlhpc.session.run import Baseline, Run, explain

    if isinstance(left, Run) and isinstance(right, Baseline):
        return ["run >= baseline", explain(left.judgement)[0]]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End each failure of a benchmark with the command that repeats it."""
    report = yield
    if report.failed and (bench := bench_of(item.config)) is not None:
        from pytest_mlhpc.session.runtest import finish_report

        finish_report(item, call, report, bench)
    return report


class FaultHooks:
    """List the tests that cannot run, and fail: --collect-only runs none whose error that would be."""

    def __init__(self, faults: Mapping[str, Sequence[Problem]]) -> None:
        self._faults = faults

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail as the tests would."""
        if self._faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write them."""
        if self._faults:
            from pytest_mlhpc.session.terminal import list_faults

            list_faults(terminalreporter, self._faults)


@dataclass
class FailureCount:
    """Counts failed reports by whose fault they are."""

    infrastructure: int = 0
    other: int = 0

    def count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Take in a report of a phase of a test, or of a collector."""
        if report.failed:
            if getattr(report, INFRA_ATTRIBUTE, False):
                self.infrastructure += 1
            else:
                self.other += 1


class OwnerHooks:
    """The hooks of the process that owns the session: pytest itself, or the controller of pytest-xdist."""

    def __init__(self, bench: Bench, config: pytest.Config) -> None:
        self._bench = bench
        self._config = config
        self._tally: FailureCount | None = None

    def pytest_plugin_registered(self, plugin: object) -> None:
        """Let conftest files that are found later take part in our own hooks."""
        if self._bench.manager is not None:
            offer(self._bench.manager, plugin)

    def pytest_report_header(self) -> str:
        """One line: where, with which preset, and where the files lie."""
        from pytest_mlhpc.session.terminal import header

        return header(self._bench)

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say which presets trainings use, what the session may cost, and what became of earlier ones' jobs."""
        if self._bench.session is None:
            return []
        from pytest_mlhpc.session.terminal import announced

        return announced(self._bench.session)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Make the session; it starts nothing before tests have declared jobs."""
        option = session.config.option
        if not (option.collectonly or option.setuponly or option.setupplan):
            self._tally = FailureCount()
            start_session(self._bench, session.config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Tell pytest-benchmark where the figures were made."""
        from pytest_mlhpc.session.runtest import add_machine

        add_machine(machine_info, self._bench)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count failures by whose fault they are, and hand measured runs to pytest-benchmark if it is asked for anything."""
        if self._tally is not None:
            self._tally.count(report)
        session = self._bench.session
        if report.when == "call" and session is not None and options.benchmark_tables_asked_for(self._config):
            from pytest_mlhpc.session.runtest import add_row

            if (job := session.jobs.get(report.nodeid)) is not None:
                add_row(self._config, job)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count what could not be collected: a failure of the tests', whatever became of the others."""
        if self._tally is not None:
            self._tally.count(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Cancel the job of a test that ended without taking its result."""
        if self._bench.session is not None:
            self._bench.session.test_over(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Cancel what is left, close everything, and say by the exit code what became of it."""
        bench = self._bench
        if bench.session is not None and self._tally is not None:
            bench.session.close()
            session.exitstatus = exit_code(session.exitstatus, self._tally, bench.session)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Write the closing table."""
        if self._bench.session is not None:
            from pytest_mlhpc.session.terminal import summarise

            summarise(terminalreporter, self._bench.session, config)


#: Work is still queued: try again later (EX_TEMPFAIL of sysexits.h, 4.3BSD).
QUEUED = 75


def exit_code(status: int, tally: FailureCount, session: BenchmarkSession) -> int:
    """Return the code for pytest's *status*.

    0: all measured and passed; 1: a failure; ``mlhpc_infra_exit_code``: infrastructure errors only; 3: an error of our own;
    5: nothing was measured; 75: work is still queued, whatever became of the rest. 2 (interrupted) and 4 (usage) stay.
    """
    interrupted = status == pytest.ExitCode.INTERRUPTED and not session.terminated
    if session.queued and not session.crashed and not interrupted:
        return QUEUED
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        return status
    if session.crashed:
        return pytest.ExitCode.INTERNAL_ERROR
    if status == pytest.ExitCode.TESTS_FAILED:
        only_infrastructure = tally.infrastructure and not tally.other
        return session.settings.infra_exit_code if only_infrastructure else status
    if session.trouble:
        return session.settings.infra_exit_code
    return status if session.measured() else pytest.ExitCode.NO_TESTS_COLLECTED
