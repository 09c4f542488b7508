"""Command-line options, their ini twins, and the frozen settings made of both."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.statedir import default_state_dir

#: How long detached jobs may stand unless --lease says otherwise, in seconds: a held queue over a long weekend.
DEFAULT_LEASE_S = 7 * 86400.0

#: Where history can be read.
HISTORY = ("local", "influx")

#: Markers that declare a job.
MARKER_NAMES = ("train", "job")

#: Their help, as ``pytest --markers`` shows them.
MARKERS = (
    """train(workload, **spec): train `workload` on the selected system and judge what was measured. Fields: nodes, \
devices, steps, warmup, data, cache, exclusive, judge, name, time_limit, launcher, and those that `mlhpc workloads` \
lists for the workload. A parametrized argument named like a field sets that field.""",
    """job(workload, **spec): the same for anything that is no training, such as job('command', argv=[...], \
metrics={'rate': {'pattern': r'rate: (\\S+)', 'unit': 'items/s', 'better': 'higher'}}).""",
)


@dataclass(frozen=True)
class Settings:
    """What this invocation was asked for. ``systems`` is empty in an ordinary pytest run."""

    systems: tuple[str, ...]
    systems_file: Path | None
    environment: str | None
    preset: str | None
    max_jobs: int | None
    update_baselines: bool
    baselines_dir: Path
    state_dir: Path
    max_reruns: int
    infra_exit_code: int
    in_ci: bool
    pack: bool = False
    detach: bool = False
    wait_s: float | None = None  #: after so long, detach
    lease_s: float = DEFAULT_LEASE_S
    resume: str | None = None  #: id of a session, or "" for all that were left
    budget: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)  #: of --set, "slurm.reservation" -> value
    each_node: str | None = None  #: idle, all, a reservation or a host list: run single-node tests on each
    here: bool = False  #: inside an allocation: submit nothing
    history: str = "local"  #: where the judge reads history: local or influx

    @property
    def active(self) -> bool:
        """Whether benchmarks run at all."""
        return bool(self.systems)


def add(parser: pytest.Parser) -> None:
    """Declare all options and ini values."""
    group = parser.getgroup("mlhpc", "benchmarks of machine-learning training (pytest-mlhpc)")
    add_one = group.addoption
    add_one("--system", action="append", metavar="NAME[:PARTITION]", dest="mlhpc_system",
            help="run benchmarks on this system of systems.yaml; may be given several times")  # fmt: skip
    add_one("--systems-file", metavar="FILE", dest="mlhpc_systems_file",
            help="systems file (default: systems.yaml of the root directory)")  # fmt: skip
    add_one("--environment", metavar="NAME", dest="mlhpc_environment",
            help="software environment of the partition, or `all` (default: its first)")  # fmt: skip
    add_one("--preset", metavar="NAME", dest="mlhpc_preset",
            help="model and input size: smoke, small, reference ... (default: the partition's)")  # fmt: skip
    add_one("--max-jobs", metavar="N", type=_positive, dest="mlhpc_max_jobs",
            help="jobs kept in the queue of each partition (default: the partition's)")  # fmt: skip
    add_one("--update-baselines", action="store_true", dest="mlhpc_update_baselines",
            help="accept what was measured: write it to the baseline files")  # fmt: skip
    add_one("--baselines-dir", metavar="DIR", dest="mlhpc_baselines_dir",
            help="baseline files, one for each system (default: baselines/ of the root directory)")  # fmt: skip
    add_one("--state-dir", metavar="DIR", dest="mlhpc_state_dir",
            help="records, logs, ledger (default: $MLHPC_STATE, else $XDG_STATE_HOME/mlhpc)")  # fmt: skip
    add_one("--no-rerun", action="store_true", dest="mlhpc_no_rerun",
            help="judge each run by its first attempt alone")  # fmt: skip
    add_one("--max-reruns", metavar="N", type=_count, dest="mlhpc_max_reruns",
            help="most re-runs of one session (default: 12)")  # fmt: skip
    add_one("--infra-exit-code", metavar="CODE", type=_exit_code, dest="mlhpc_infra_exit_code",
            help="exit code when nothing but the infrastructure failed (default: 1)")  # fmt: skip
    add_one("--pack", action="store_true", dest="mlhpc_pack",
            help="let tests with equal needs share an allocation, one after the other")  # fmt: skip
    add_one("--detach", action="store_true", dest="mlhpc_detach",
            help="submit and exit (75); a later session goes on with it")  # fmt: skip
    add_one("--wait", metavar="TIME", type=_duration, dest="mlhpc_wait",
            help="wait so long for results (50m), then detach what is left and exit with 75")  # fmt: skip
    add_one("--lease", metavar="TIME", type=_duration, dest="mlhpc_lease",
            help="how long detached jobs may stand until they are cancelled (default: 7d)")  # fmt: skip
    add_one("--resume", metavar="ID", nargs="?", const="", type=_session, dest="mlhpc_resume",
            help="submit nothing: judge what earlier sessions (or the one that is named) left; exit 75 while any is queued")  # fmt: skip
    add_one("--budget", metavar="HOURS", type=_budget, dest="mlhpc_budget",
            help="refuse to start, and stop re-runs, beyond so many node-hours (20nh)")  # fmt: skip
    add_one("--set", action="append", metavar="SCHEDULER.KEY=VALUE", dest="mlhpc_set",
            help="another value than systems.yaml's for this session, such as slurm.reservation=maint42; may be given several times")  # fmt: skip
    add_one("--each-node", metavar="WHICH", nargs="?", const="idle", dest="mlhpc_each_node",
            help="run tests of one node once on each: idle (default), all, a reservation, or a host list such as node[1-9]")  # fmt: skip
    add_one("--here", action="store_true", dest="mlhpc_here",
            help="inside a Slurm job: run in it and submit nothing")  # fmt: skip
    add_one("--history", choices=HISTORY, dest="mlhpc_history",
            help="where the judge reads history: local (the store, default) or influx ($MLHPC_INFLUX_URL)")  # fmt: skip
    for name, kind, text in _INI:
        parser.addini(name, text, type=kind, default=None)


_INI: tuple[tuple[str, Any, str], ...] = (
    ("mlhpc_system", "args", "as --system; several are separated by blanks"),
    ("mlhpc_systems_file", "string", "as --systems-file, relative to the root directory"),
    ("mlhpc_environment", "string", "as --environment"),
    ("mlhpc_preset", "string", "as --preset"),
    ("mlhpc_max_jobs", "string", "as --max-jobs"),
    ("mlhpc_baselines_dir", "string", "as --baselines-dir, relative to the root directory"),
    ("mlhpc_state_dir", "string", "as --state-dir, relative to the root directory"),
    ("mlhpc_no_rerun", "bool", "as --no-rerun"),
    ("mlhpc_max_reruns", "string", "as --max-reruns"),
    ("mlhpc_infra_exit_code", "string", "as --infra-exit-code"),
    ("mlhpc_pack", "bool", "as --pack"),
    ("mlhpc_budget", "string", "as --budget"),
    ("mlhpc_history", "string", "as --history"),
)


def settings_of(config: pytest.Config) -> Settings:
    """Return what options, then ini values, then the environment ask for.

    Raises:
        pytest.UsageError: an ini value is no number where one is needed, or an option's folder has moved the root directory.
    """
    root, here = config.rootpath, config.invocation_params.dir
    _check_root(config)

    def text(name: str) -> str | None:
        given = config.getoption(f"mlhpc_{name}") or config.getini(f"mlhpc_{name}")
        return str(given) if given else None

    def path(name: str) -> Path | None:
        if given := config.getoption(f"mlhpc_{name}"):
            return (here / Path(given).expanduser()).resolve()
        if given := config.getini(f"mlhpc_{name}"):
            return (root / Path(given).expanduser()).resolve()
        return None

    systems = config.getoption("mlhpc_system") or config.getini("mlhpc_system") or ()
    return Settings(
        systems=tuple(dict.fromkeys(systems)),
        systems_file=path("systems_file"),
        environment=text("environment"),
        preset=text("preset"),
        max_jobs=_number(config, "max_jobs", _positive, None),
        update_baselines=bool(config.getoption("mlhpc_update_baselines")),
        baselines_dir=path("baselines_dir") or root / "baselines",
        state_dir=path("state_dir") or default_state_dir(os.environ),
        max_reruns=0
        if config.getoption("mlhpc_no_rerun") or config.getini("mlhpc_no_rerun")
        else _number(config, "max_reruns", _count, 12) or 0,
        infra_exit_code=_number(config, "infra_exit_code", _exit_code, 1) or 1,
        in_ci=bool(os.environ.get("CI")),
        pack=bool(config.getoption("mlhpc_pack") or config.getini("mlhpc_pack")),
        detach=bool(config.getoption("mlhpc_detach")),
        wait_s=config.getoption("mlhpc_wait"),
        lease_s=config.getoption("mlhpc_lease") or DEFAULT_LEASE_S,
        resume=config.getoption("mlhpc_resume"),
        budget=_budget_of(config),
        overrides=_overrides(config.getoption("mlhpc_set") or ()),
        each_node=config.getoption("mlhpc_each_node"),
        here=bool(config.getoption("mlhpc_here")),
        history=_history(config, text("history")),
    )


def _check_root(config: pytest.Config) -> None:
    """Refuse a root directory that pytest has found by an option's value: it takes each word that exists for a path of tests.

    Benchmarks would get other names there, and their baselines would not be found.
    """
    here, words = config.invocation_params.dir, config.invocation_params.args
    if config.inipath is not None or config.rootpath not in here.parents:
        return
    for option, value in itertools.pairwise(map(str, words)):
        if option in {"--systems-file", "--baselines-dir", "--state-dir"}:
            path = (here / value).resolve()
            if path.exists() and not path.is_relative_to(here):
                raise pytest.UsageError(
                    f"pytest takes {value} for a path of tests, which makes {config.rootpath} its root directory; "
                    f"write {option}={value}"
                )


def folder_options(settings: Settings, default_baselines: Path) -> tuple[str, ...]:
    """Return the options that name the state and the baselines where they lie elsewhere than by default.

    Each is one word: pytest takes a folder that is a word of its own for one of those that set its root directory.
    *default_baselines* is where the command that gets them looks by itself.
    """
    options: tuple[str, ...] = ()
    if settings.state_dir != default_state_dir(os.environ):
        options += (f"--state-dir={settings.state_dir}",)
    if settings.baselines_dir != default_baselines:
        options += (f"--baselines-dir={settings.baselines_dir}",)
    return options


def is_marked(node: pytest.Item) -> bool:
    """Whether a test declares a job."""
    return any(node.get_closest_marker(name) for name in MARKER_NAMES)


def skip_marked(items: list[pytest.Item]) -> None:
    """Skip marked tests in a run that selects no system."""
    for item in items:
        if is_marked(item):
            item.add_marker(pytest.mark.skip(reason="a benchmark; to run it, pass --system NAME"))


def _number(config: pytest.Config, name: str, parse: Any, default: int | None) -> int | None:
    given = config.getoption(f"mlhpc_{name}")
    if given is not None:
        return int(given)
    ini = config.getini(f"mlhpc_{name}")
    if not ini:
        return default
    try:
        return int(parse(ini))
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"{config.inipath}: mlhpc_{name}: {error}") from None


def _history(config: pytest.Config, given: str | None) -> str:
    if given and given not in HISTORY:  # an ini value: the parser has looked at the option
        raise pytest.UsageError(f"{config.inipath}: mlhpc_history: {given!r} is none of {', '.join(HISTORY)}")
    return given or HISTORY[0]


def _budget_of(config: pytest.Config) -> str | None:
    """Return the budget as it was written; an ini value is checked here, an option was when it was parsed."""
    if given := config.getoption("mlhpc_budget"):
        return str(given)
    ini = config.getini("mlhpc_budget")
    try:
        return _budget(ini) if ini else None
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"{config.inipath}: mlhpc_budget: {error}") from None


def _overrides(texts: Sequence[str]) -> Mapping[str, str]:
    if not texts:
        return {}
    from pytest_mlhpc.errors import UsageError
    from pytest_mlhpc.system.overrides import parse

    try:
        return parse(texts)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _duration(text: str) -> float:
    from pytest_mlhpc.system.quantities import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _session(text: str) -> str:
    """Refuse a path of tests, which ``--resume suites/`` would take for the id."""
    if text and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no id of a session; to go on with all that was left, put paths first: pytest {text} --resume"
        )
    return text


def _budget(text: str) -> str:
    from pytest_mlhpc.jobs.budget import parse

    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _positive(text: str) -> int:
    return _whole(text, 1, 1_000_000)


def _count(text: str) -> int:
    return _whole(text, 0, 1_000_000)


def _exit_code(text: str) -> int:
    return _whole(text, 1, 255)


def _whole(text: str, least: int, most: int) -> int:
    """Parse for argparse, which puts a ValueError's text aside: the useful words travel in its own error."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, found {number}")
    return number
