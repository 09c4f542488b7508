"""Options that several commands have, and the systems that these choose."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_mlhpc.cli.commands import NearestChoice
from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.history.events import Event, known_events, planned
from pytest_mlhpc.store.locations import default_state_dir
from pytest_mlhpc.store.text import tell

if TYPE_CHECKING:
    from pytest_mlhpc.config.systems import Systems
    from pytest_mlhpc.history.level_changes import NightlyQuery
    from pytest_mlhpc.history.series import LocalSource, Source
    from pytest_mlhpc.influx.source import InfluxSource

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Where systems are described; a command that has none given searches for it.
systems_file = click.option("--systems-file", metavar="FILE", help="[default: systems.yaml of this folder]")
baselines_dir = click.option(
    "--baselines-dir",
    type=Path,
    default=Path("baselines"),
    metavar="DIR",
    help="Accepted values.  [default: ./baselines]",
)
system = click.option("--system", default="", metavar="NAME", help="Only this system.")
benchmark = click.option(
    "--benchmark",
    default="",
    metavar="TEXT",
    help="Only benchmarks whose name or definition holds TEXT (test, workload, k=v).",
)


def _state_dir(_ctx: click.Context, _option: click.Parameter, value: Path | None) -> Path:
    return value or default_state_dir(os.environ)


state_dir = click.option(
    "--state-dir",
    type=Path,
    metavar="DIR",
    callback=_state_dir,
    help="Where records lie.  [default: $MLHPC_STATE]",
)


#: Of commands whose ``--output`` is no report: all others are ``DataCommand``.
as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one object.")


def _since(_ctx: click.Context, _option: click.Parameter, value: str | None) -> int:
    return 0 if value is None else moment(value, time.time_ns())


#: A century: nothing is older that is asked for by its age.
_OLDEST_S = 100 * 366 * 86400.0


def moment(text: str, now_ns: int, option: str = "--since", like: str = "30d or 12h") -> int:
    """Return the moment *text* ago, or that of a date, in ns UTC.

    Raises:
        UsageError: it is neither a duration nor a date.
    """
    from pytest_mlhpc.config.quantities import parse_duration, parse_months
    from pytest_mlhpc.store.text import months_before, nanoseconds

    with contextlib.suppress(ValueError):
        return max(0, now_ns - int(parse_duration(text, _OLDEST_S) * 1e9))
    with contextlib.suppress(ValueError):
        return max(0, months_before(now_ns, parse_months(text)))
    try:
        if text.strip():
            return nanoseconds(text)
    except (ValueError, OverflowError, OSError):
        pass
    raise UsageError(f"{option} {text!r} is neither a time like {like} nor a date like 2026-11-21")


def since(default: str = "") -> Callable[[_Function], _Function]:
    """Add ``since_ns``: nanoseconds UTC, 0 where *default* is empty and nothing is given."""
    return click.option(
        "--since",
        "since_ns",
        default=default or None,
        metavar="TIME",
        callback=_since,
        help=f"30d, 12h or a date.  [default: {default or 'all'}]",
    )


def source(function: _Function) -> _Function:
    """Add ``source`` (``--from``) and ``state_dir``."""
    origin = click.option(
        "--from",
        "source",
        type=NearestChoice(["local", "influx"]),
        default="local",
        help="Read history from the local store, or the InfluxDB of $MLHPC_INFLUX_URL.  [default: local]",
    )
    return origin(state_dir(function))


branch = click.option(
    "--branch",
    default="",
    metavar="NAME",
    help="Whose nightly runs are watched.  [default: the default branch of the checkout, else main]",
)


def runs(default: int) -> Callable[[_Function], _Function]:
    """Add ``runs``."""
    return click.option(
        "--runs",
        type=click.IntRange(1, 1000),
        default=default,
        show_default=True,
        metavar="N",
        help="Median of the last N accepted runs.",
    )


def pipeline(function: _Function) -> _Function:
    """Add what chooses the records of a pipeline: ``system``, ``since_ns``, ``commit``, ``changes``, ``state_dir``."""
    commit = click.option(
        "--commit", default="", metavar="SHA", help="Only of this commit, or how it begins."
    )
    changes = click.option("--changes", is_flag=True, help="Only of merge requests, not of nights.")
    return system(since("1d")(commit(changes(state_dir(function)))))


scheduler = click.option(
    "--scheduler",
    type=NearestChoice(["auto", "slurm", "kubernetes"]),
    default="auto",
    help="Whose nodes they are.  [default: what is here]",
)


def chosen_systems(file: str | None, hook: Any = None) -> Systems:
    """Return all systems of *file*.

    Raises:
        ConfigError: the file is wrong; names every problem.
    """
    from pytest_mlhpc.builtin import make_manager
    from pytest_mlhpc.config.systems import load_systems
    from pytest_mlhpc.config.systems_files import find_systems_file

    hook = hook or make_manager().hook
    return load_systems(
        find_systems_file(Path.cwd(), file),
        schedulers=_merged(hook.mlhpc_schedulers()),
        launchers=_merged(hook.mlhpc_launchers()),
        environ=os.environ,
    )


def false_alarms() -> float:
    """Return how many false alarms a month the site accepts, as its systems file says; the usual one where that is wrong, which is reported."""
    try:
        return chosen_systems(None).false_alarms
    except ConfigError as error:
        tell(f"{error}\nfalse_alarms: 1 per month is taken")
        return 1.0


def site_events(state_dir: Path, source: Source | None = None) -> tuple[Event, ...]:
    """Return the events that are stored, those of *source*, and the maintenances of the systems file; what is wrong there is reported."""
    found = {one.id: one for one in known_events(state_dir, source, tell)}
    with contextlib.suppress(ConfigError):  # false_alarms() names what is wrong
        for system, partition, one in chosen_systems(None).maintenances():
            event = planned(system, partition, one.reason, one.start_ns, one.end_ns, by="systems.yaml")
            found[event.id] = event
    return tuple(sorted(found.values(), key=lambda event: (event.at_ns, event.made_ns, event.id)))


def publish_events(state_dir: Path) -> None:
    """Send what was noted, and all else that waits, to the InfluxDB that the environment names; why it could not is reported."""
    from pytest_mlhpc.influx import credentials

    if credentials.is_configured(os.environ):
        from pytest_mlhpc.influx.publisher import publish

        publish(state_dir, os.environ, lambda text: tell(f"InfluxDB: {text}"))


def _merged(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for answer in answers for name, value in answer.items()}


def selection_of(system: str, branch: str, *, judged_only: bool) -> NightlyQuery:
    """Return what is to be looked at; without *branch*, the nightly runs of the default one."""
    from pytest_mlhpc.history.level_changes import NightlyQuery
    from pytest_mlhpc.store.record import provenance_of

    branch = branch or provenance_of(Path.cwd()).default_branch
    return NightlyQuery(system=system, default_branch=branch, judged_only=judged_only)


@contextlib.contextmanager
def chosen(name: str, state_dir: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Source]:
    """Open the history of that name (``--from``), the local store's or InfluxDB's, and close it in the end.

    Raises:
        UsageError: InfluxDB is asked for, but how to reach it is not said.
    """
    opened: LocalSource | InfluxSource
    if name == "local":
        from pytest_mlhpc.history.series import LocalSource

        opened = LocalSource(state_dir, tell)
    else:
        from pytest_mlhpc.influx.source import influx_source

        opened = influx_source(environ)
    with contextlib.closing(opened):
        yield opened
