"""What an invocation with ``--system`` knows, in any of its processes: settings, targets, workloads, and who answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pytest_mlhpc.errors import MlhpcError, Problem, UsageError, did_you_mean
from pytest_mlhpc.options import Settings
from pytest_mlhpc.session.owners import CodeOwners, read_code_owners

if TYPE_CHECKING:
    import pluggy

    from pytest_mlhpc.config.model import Target
    from pytest_mlhpc.config.systems import Systems
    from pytest_mlhpc.jobs.job import Job, Outcome
    from pytest_mlhpc.jobs.spec import JobSpec
    from pytest_mlhpc.node.worker.workloads.definitions import Workload
    from pytest_mlhpc.session.each_node import Sweep
    from pytest_mlhpc.session.revision import Revision
    from pytest_mlhpc.session.session import BenchmarkSession
    from pytest_mlhpc.store.record import Failure

#: Attribute of reports (it travels to the controller of pytest-xdist) of errors that are the infrastructure's.
INFRA_ATTRIBUTE = "mlhpc_infrastructure"


class ResultSource(Protocol):
    """Where a process that runs tests gets its results: the session itself, or a client of the controller's."""

    def wait(self, node_id: str, tick: Callable[[Job], None] | None = None) -> Outcome:
        """Block until the result of *node_id* is there."""

    def lost(self, node_id: str) -> Failure | None:
        """Return why the nodes that the test holds are gone; None while they are there."""

    def test_over(self, node_id: str) -> None:
        """Note that the test has ended, with or without its result."""


@dataclass
class Bench:
    """State of one invocation in one process. ``specs`` are the declared jobs by node id."""

    settings: Settings
    targets: tuple[Target, ...]
    workloads: Mapping[str, Workload]
    launchers: Mapping[str, str] = field(default_factory=dict)  #: name -> payload module
    #: of the options that tests may give to the schedulers of the targets
    models: Mapping[str, type[Any] | None] = field(default_factory=dict)
    manager: pluggy.PluginManager | None = None  #: not in workers of pytest-xdist
    session: BenchmarkSession | None = None  #: not in workers of pytest-xdist, not with --collect-only
    source: ResultSource | None = None
    #: only in workers of pytest-xdist
    declare_remotely: Callable[[Sequence[JobSpec], Bench], None] | None = None
    specs: dict[str, JobSpec] = field(default_factory=dict)
    #: by function: parameters that are no field
    misnamed: dict[str, list[Problem]] = field(default_factory=dict)
    faults: dict[str, list[Problem]] = field(default_factory=dict)  #: by node id: why the test cannot run
    deselected: list[str] = field(default_factory=list)
    #: Of the selected systems, as the systems file has them: system -> partition -> names of its environments.
    places: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    false_alarms: float = 1.0  #: a month, as the systems file says
    #: of B with --mlhpc-against rev=; without worktree where tests are only collected
    revision: Revision | None = None
    sweep: Sweep | None = None  #: with --mlhpc-each-node; not in workers of pytest-xdist
    code_owners: CodeOwners = field(default_factory=CodeOwners)
    owners: dict[Path, str] = field(default_factory=dict)  #: of files of tests, as CODEOWNERS says

    def owner_of(self, path: Path) -> str:
        """Return who owns a file of tests, empty where CODEOWNERS does not say."""
        if path not in self.owners:
            self.owners[path] = self.code_owners.of(path)
        return self.owners[path]

    def spec_of(self, item: pytest.Item) -> JobSpec | None:
        """Return the job that *item* declared, if any."""
        return self.specs.get(item.nodeid)


BENCH = pytest.StashKey[Bench]()


def bench_of(config: pytest.Config) -> Bench | None:
    """Return the state of this invocation, None without ``--system``."""
    return config.stash.get(BENCH, None)


def activate(config: pytest.Config, settings: Settings) -> Bench:
    """Load systems file and workloads, and select targets. Nothing is written or started.

    Raises:
        pytest.UsageError: what is wrong, all problems at once.
    """
    from pytest_mlhpc.builtin import make_manager
    from pytest_mlhpc.jobs.spec import SCHEDULERS

    manager = make_manager()
    workloads = workloads_of(manager, config)
    launchers = {k: v for answer in manager.hook.mlhpc_launchers() for k, v in answer.items()}
    schedulers = {k: v for answer in manager.hook.mlhpc_schedulers() for k, v in answer.items()}
    try:
        systems = _systems(config, settings, schedulers, tuple(launchers))
        targets = _targets(systems, settings, schedulers)
        revision = _other_side(targets, settings, config.rootpath)
        targets, sweep = _placed(targets, settings)
        if sweep is not None and sweep.reservation:
            changed = {**settings.overrides, "slurm.reservation": sweep.reservation}
            settings = replace(settings, overrides=changed)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    models = {
        name: schedulers.get(name) for name in SCHEDULERS & {one.partition.scheduler for one in targets}
    }
    places = {
        name: {part: entry.environments(part) for part in entry.partitions}
        for name, entry in systems.known.items()
        if name in {one.partition.system for one in targets}
    }
    bench = Bench(
        settings,
        targets,
        workloads,
        launchers,
        models,
        manager,
        places=places,
        false_alarms=systems.false_alarms,
        sweep=sweep,
        revision=revision,
    )
    bench.code_owners = read_code_owners(config.rootpath)
    config.stash[BENCH] = bench
    return bench


def workloads_of(manager: pluggy.PluginManager, config: pytest.Config) -> dict[str, Workload]:
    """Let plug-ins of pytest and conftest files that implement our hooks take part; return all workloads."""
    for plugin in config.pluginmanager.get_plugins():
        offer(manager, plugin)
    return {w.name: w for group in manager.hook.mlhpc_workloads() for w in group}


def offer(manager: pluggy.PluginManager, plugin: object) -> None:
    """Register *plugin*, a conftest file or a plug-in of pytest, if it implements hooks of ours."""
    if any(name.startswith("mlhpc_") for name in vars(plugin)) and not manager.is_registered(plugin):
        manager.register(plugin)


def start_session(bench: Bench, config: pytest.Config) -> None:
    """Make the one session; it starts nothing before jobs are declared."""
    from pytest_mlhpc.session.session import BenchmarkSession

    assert bench.manager is not None  # noqa: S101 - workers have no session
    if os.environ.get("MLHPC_INFLUX_URL"):
        from pytest_mlhpc.influx.publisher import register

        register(bench.manager, bench.settings.state_dir, os.environ)
    session = BenchmarkSession(
        bench.settings, bench.manager, dict(bench.workloads), config.rootpath, bench.false_alarms
    )
    session.notes += bench.code_owners.problems
    bench.session = bench.source = session
    if bench.revision is not None:
        try:
            bench.revision = session.check_out(bench.revision, bench.targets)
        except MlhpcError as error:
            raise pytest.UsageError(str(error)) from None


def _systems(
    config: pytest.Config,
    settings: Settings,
    schedulers: Mapping[str, type[Any] | None],
    launchers: tuple[str, ...],
) -> Systems:
    from pytest_mlhpc.config.systems import load_systems
    from pytest_mlhpc.config.systems_files import find_systems_file

    return load_systems(
        find_systems_file(config.rootpath, settings.systems_file),
        schedulers=schedulers,
        environ=os.environ,
        launchers=launchers,
        state_dir=settings.state_dir,
    )


def _targets(
    systems: Systems, settings: Settings, schedulers: Mapping[str, type[Any] | None]
) -> tuple[Target, ...]:
    if settings.check:
        return systems.every_target()[0]
    found: Sequence[Target] = [
        target for name in settings.systems for target in systems.select(name, settings.environment)
    ]
    from pytest_mlhpc.config.overrides import apply, neutral

    if settings.baseline == "update" and not neutral(settings.overrides):
        raise UsageError(
            f"--mlhpc-baseline=update with --mlhpc-set {', '.join(settings.overrides)}: figures of other options than systems.yaml's "
            "are no baseline for it; change the file, or leave one out"
        )
    return apply(tuple({target.id: target for target in found}.values()), settings.overrides, schedulers)


def _other_side(targets: Sequence[Target], settings: Settings, root: Path) -> Revision | None:
    """Return the revision of B; refuse an environment that no selected partition has, and options that exclude a comparison.

    Raises:
        UsageError: names what there is.
    """
    if settings.against is None:
        return None
    from pytest_mlhpc.session.against import refuse

    refuse(settings)
    name = settings.against.environment
    known = {one.name for target in targets for one in target.partition.environments}
    if name and name not in known:
        raise UsageError(
            f"--mlhpc-against environment={name}: no selected partition has it; there are {', '.join(sorted(known))}"
            + did_you_mean(name, known)
        )
    if not settings.against.rev:
        return None
    from pytest_mlhpc.session.revision import find_revision

    alone = not (settings.against.image or settings.against.variables)
    return find_revision(root, settings.against.rev, only=alone)


def outliving(settings: Settings) -> list[str]:
    """Return the given options by which jobs outlive this pytest."""
    options = {"--mlhpc-wait": settings.wait_s, "--mlhpc-resume": settings.resume}
    return [option for option, value in options.items() if value is not None]


def _placed(targets: tuple[Target, ...], settings: Settings) -> tuple[tuple[Target, ...], Sweep | None]:
    """Return *targets* within the allocation around us (``mlhpc_here``), or one for each node (--mlhpc-each-node).

    Raises:
        UsageError: that cannot be. pytest.Exit: Slurm or its nodes are not to be had now.
    """
    if settings.each_node is None and not settings.here:
        return targets, None
    from pytest_mlhpc.provision.scheduler.client import SchedulerError, SchedulerRefused, SchedulerUnusable
    from pytest_mlhpc.session import each_node

    each_node.refuse(settings)
    try:
        if settings.here:
            from pytest_mlhpc.provision.slurm.inside_job import select_own_partition

            own = select_own_partition(
                targets, os.environ, each_node.client_of, settings.systems, outliving(settings)
            )
            return own, None
        return each_node.expand(targets, str(settings.each_node), each_node.client_of)
    except (SchedulerRefused, SchedulerUnusable) as error:
        raise UsageError(str(error)) from error
    except (SchedulerError, each_node.NothingToMeasureError) as error:
        pytest.exit(f"infra: {error}; nothing was submitted", returncode=settings.infra_exit_code)
