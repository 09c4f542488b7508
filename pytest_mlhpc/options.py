"""Command-line options, their ini twins, and the frozen settings made of both."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc.store.locations import default_state_dir

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Target
    from pytest_mlhpc.config.overrides import Against

#: How long detached jobs may stand unless `mlhpc_lease` says otherwise, in seconds: a held queue over a long weekend.
DEFAULT_LEASE_S = 7 * 86400.0

#: Where history can be read.
HISTORY = ("local", "influx")

#: What becomes of a series without baseline, and of what was measured.
BASELINE = ("fail", "record", "update")

#: Everybody's word: ours only where it is free.
SHORT = "--system"


#: All arguments of pytest's command line, those of ``addopts`` too.
ARGS = pytest.StashKey[Sequence[str]]()


@dataclass(frozen=True)
class Settings:
    """What this invocation was asked for. ``systems`` is empty in an ordinary pytest run."""

    systems: tuple[str, ...]
    systems_file: Path | None
    environment: str | None
    preset: str | None
    max_jobs: int | None
    baseline: str  #: one of BASELINE
    baselines_dir: Path
    state_dir: Path
    reruns: int
    infra_exit_code: int
    pack: bool = False
    wait_s: float | None = None  #: after so long, detach; 0: as soon as all is submitted
    lease_s: float = DEFAULT_LEASE_S
    resume: str | None = None  #: id of a session, or "" for all that were left
    budget: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)  #: "slurm.reservation" -> value
    against: Against | None = None  #: the second side of a comparison
    each_node: str | None = None  #: idle, all, a reservation or a host list: run single-node tests on each
    here: bool = False  #: inside an allocation: submit nothing
    history: str = "local"  #: where the judge reads history: local or influx
    check: bool = False  #: collect what is declared on every system of the file, and run nothing
    system_option: str = SHORT  #: the form in which a command of ours may select a system here

    @property
    def active(self) -> bool:
        """Whether benchmarks are collected at all."""
        return bool(self.systems) or self.check


def add(parser: pytest.Parser) -> None:
    """Declare all options but the short one, and all ini values."""
    add_one = _group(parser).addoption
    add_one("--mlhpc-system", action="append", metavar="NAME[:PARTITION]", help=_SYSTEM_HELP)
    add_one("--mlhpc-environment", metavar="NAME",
            help="software environment of the partition, or `all` (default: its first)")  # fmt: skip
    add_one("--mlhpc-preset", metavar="NAME",
            help="model and input size: smoke, small, reference ... (default: the partition's)")  # fmt: skip
    add_one("--mlhpc-pack", action="store_true",
            help="let tests with equal needs share an allocation, one after the other")  # fmt: skip
    add_one("--mlhpc-wait", metavar="TIME", type=_wait,
            help="wait so long for results (50m; 0: not at all), then detach what is left and exit with 75")  # fmt: skip
    add_one("--mlhpc-resume", metavar="ID", nargs="?", const="", type=_session,
            help="submit nothing: judge what earlier sessions (or the one that is named) left; exit 75 while any is queued")  # fmt: skip
    add_one("--mlhpc-set", action="append", metavar="SCHEDULER.KEY=VALUE",
            help="another value than systems.yaml's for this session, such as slurm.reservation=maint42; may be given several times")  # fmt: skip
    add_one("--mlhpc-against", action="append", metavar="WHAT=VALUE",
            help="compare what is selected (A) with another side (B) on the same nodes, run in turns: environment=NAME, "
            "rev=REVISION, image=IMAGE or variables.NAME=VALUE; precision=1%%: ends once no difference as large is left (default: 1.5%%); runs=12: at most so many (default: 30)")  # fmt: skip
    add_one("--mlhpc-each-node", metavar="WHICH", nargs="?", const="idle",
            help="run tests of one node once on each: idle (default), all, a reservation, or a host list such as node[1-9]")  # fmt: skip
    add_one("--mlhpc-baseline", choices=BASELINE,
            help="a series without baseline is recorded as new (record), or fails its test (fail: the default where CI is set); "
            "update: accept what was measured, and write it to the baseline files")  # fmt: skip
    add_one("--mlhpc-reruns", metavar="N", type=_count,
            help="most re-runs of one session (default: 12; 0: judge each run by its first attempt)")  # fmt: skip
    add_one("--mlhpc-state", metavar="DIR",
            help="records, logs, ledger (default: $MLHPC_STATE, else $XDG_STATE_HOME/mlhpc)")  # fmt: skip
    for name, kind, text in _INI:
        parser.addini(f"mlhpc_{name}", text, type=kind, default=None)


def add_short(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Declare ``--system`` if *args* hold it, and neither a plug-in nor a conftest file does."""
    _, unknown = parser.parse_known_and_unknown_args(args)
    if _has_short(unknown):
        _group(parser).addoption(SHORT, action="append", dest="mlhpc_system", help=_SYSTEM_HELP)


def _has_short(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == SHORT for word in arguments)


def without_names(paths: Sequence[str], args: Sequence[str], here: Path) -> list[str]:
    """Return *paths* of tests without the arguments behind ``--system``, which pytest does not know yet to be none."""
    names = {value for option, value in itertools.pairwise(args) if option == SHORT}
    return [path for path in paths if path not in names or (here / path).exists()]


def _group(parser: pytest.Parser) -> Any:
    return parser.getgroup("mlhpc", "benchmarks of machine-learning training (pytest-mlhpc)")


_SYSTEM_HELP = (
    "run benchmarks on this system of systems.yaml; may be given several times; short: --system, unless another plug-in "
    "or conftest.py has an option of that name"
)

_INI: tuple[tuple[str, Any, str], ...] = (
    ("system", "args", "as --mlhpc-system; several are separated by blanks"),
    ("environment", "string", "as --mlhpc-environment"),
    ("preset", "string", "as --mlhpc-preset"),
    ("pack", "bool", "as --mlhpc-pack"),
    ("reruns", "string", "as --mlhpc-reruns"),
    ("state", "string", "as --mlhpc-state, relative to the root directory"),
    ("systems_file", "string", "systems file, relative to the root directory (default: systems.yaml)"),
    (
        "baselines_dir",
        "string",
        "baseline files, one for each system; relative to the root directory (default: baselines)",
    ),
    ("max_jobs", "string", "jobs kept in the queue of each partition (default: the partition's)"),
    ("infra_exit_code", "string", "exit code when nothing but the infrastructure failed (default: 1)"),
    ("budget", "string", "refuse to start, and stop re-runs, beyond so many node-hours (20nh)"),
    (
        "history",
        "string",
        "where the judge reads history: local (the store, default) or influx ($MLHPC_INFLUX_URL)",
    ),
    ("lease", "string", "how long detached jobs may stand until they are cancelled (default: 7d)"),
    ("here", "bool", "inside a Slurm job: run in it and submit nothing"),
    (
        "check",
        "bool",
        "with --collect-only: check tests against every system of the file, as `mlhpc check` does",
    ),
)


def settings_of(config: pytest.Config) -> Settings:
    """Return what options, then ini values, then the environment ask for.

    Raises:
        pytest.UsageError: an ini value is not what is needed, or an option's folder has moved the root directory.
    """
    root = config.rootpath
    _check_root(config)
    systems = _given(config, "system") or ()
    check = bool(_ini(config, "check"))
    if check and not config.option.collectonly:
        raise pytest.UsageError("mlhpc_check runs nothing: pass --collect-only as well, or use `mlhpc check`")
    state, file, folder = (
        config.option.mlhpc_state,
        _ini(config, "systems_file"),
        _ini(config, "baselines_dir"),
    )
    state_dir = config.invocation_params.dir / Path(state).expanduser() if state else None
    if state_dir is None and (state := _ini(config, "state")):
        state_dir = root / Path(state).expanduser()
    return Settings(
        systems=tuple(dict.fromkeys(systems)),
        systems_file=(root / Path(file).expanduser()).resolve() if file else None,
        environment=_given(config, "environment"),
        preset=_given(config, "preset"),
        max_jobs=_ini(config, "max_jobs", _positive),
        baseline=config.option.mlhpc_baseline or ("fail" if os.environ.get("CI") else "record"),
        baselines_dir=(root / Path(folder or "baselines").expanduser()).resolve(),
        state_dir=state_dir.resolve()
        if state_dir
        else (_default_state_dir() if systems or check else Path()),
        reruns=0 if config.option.mlhpc_against else _or(_given(config, "reruns", _count), 12),
        infra_exit_code=_ini(config, "infra_exit_code", _exit_code) or 1,
        pack=bool(_given(config, "pack")),
        wait_s=config.option.mlhpc_wait,
        lease_s=_or(_ini(config, "lease", _duration), DEFAULT_LEASE_S),
        resume=config.option.mlhpc_resume,
        budget=_ini(config, "budget", _budget),
        overrides=_overrides(config.option.mlhpc_set or ()),
        against=_against(config.option.mlhpc_against),
        each_node=config.option.mlhpc_each_node,
        here=bool(_ini(config, "here")),
        history=_ini(config, "history", _history) or HISTORY[0],
        check=check,
        system_option=SHORT if _has_short(config.stash.get(ARGS, ())) else "--mlhpc-system",
    )


def _given(config: pytest.Config, name: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Return what the option says, else the ini value of the same name."""
    option = getattr(config.option, f"mlhpc_{name}")
    return _ini(config, name, parse) if option is None or option is False else option


def _ini(config: pytest.Config, name: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Return an ini value, None where it is not given or empty.

    Raises:
        pytest.UsageError: *parse* refuses it.
    """
    value = config.getini(f"mlhpc_{name}") or None
    try:
        return parse(value) if parse and value is not None else value
    except argparse.ArgumentTypeError as error:
        where = f" or {config.inipath}" if config.inipath else ""
        raise pytest.UsageError(f"mlhpc_{name}: {error} (by -o{where})") from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _default_state_dir() -> Path:
    from pytest_mlhpc.errors import UsageError

    try:
        return default_state_dir(os.environ)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _check_root(config: pytest.Config) -> None:
    """Refuse a root directory that pytest has found by an option's value: it takes each word that exists for a path of tests.

    Benchmarks would get other names there, and their baselines would not be found.
    """
    here, arguments = config.invocation_params.dir, config.invocation_params.args
    if config.inipath is not None or config.rootpath not in here.parents:
        return
    for option, value in itertools.pairwise(map(str, arguments)):
        path = (here / value).resolve()
        if option == "--mlhpc-state" and path.exists() and not path.is_relative_to(here):
            raise pytest.UsageError(
                f"pytest takes {value} for a path of tests, which makes {config.rootpath} its root directory; "
                f"write {option}={value}"
            )


def benchmark_tables_asked_for(config: pytest.Config) -> bool:
    """Whether pytest-benchmark was given an option: without one its tables would bury ours."""
    return any(word.startswith("--benchmark-") for word in config.stash.get(ARGS, ()))


def state_and_baselines(settings: Settings, default_baselines: Path) -> tuple[str, ...]:
    """Return the options of `mlhpc` that name state and baselines where they lie elsewhere than by default.

    *default_baselines* is where the command that gets them reads by default.
    """
    options: tuple[str, ...] = ()
    if settings.state_dir != default_state_dir(os.environ):
        options += (f"--state-dir={settings.state_dir}",)
    if settings.baselines_dir != default_baselines:
        options += (f"--baselines-dir={settings.baselines_dir}",)
    return options


def options_of_target(settings: Settings, target: Target) -> tuple[str, ...]:
    """Return the options of pytest that say where in its partition a test runs."""
    arguments: tuple[str, ...] = ()
    if len(target.partition.environments) > 1 or settings.environment:
        arguments += ("--mlhpc-environment", target.environment.name)
    return (*arguments, f"--mlhpc-each-node={target.node}") if target.node else arguments


def repeated_options(settings: Settings, root: Path) -> tuple[str, ...]:
    """Return the options of pytest that say what holds for a whole session, but for where it runs.

    A folder is one word with its option: pytest takes one that is a word of its own for a path of tests.
    """
    arguments: tuple[str, ...] = ()
    if settings.preset:
        arguments += ("--mlhpc-preset", settings.preset)
    arguments += tuple(f"--mlhpc-set={name}={value}" for name, value in settings.overrides.items())
    arguments += (
        tuple(f"--mlhpc-against={word}" for word in settings.against.values) if settings.against else ()
    )
    if settings.state_dir != default_state_dir(os.environ):
        arguments += (f"--mlhpc-state={settings.state_dir}",)
    if settings.systems_file:
        arguments += ("-o", f"mlhpc_systems_file={settings.systems_file}")
    if settings.baselines_dir != root / "baselines":
        arguments += ("-o", f"mlhpc_baselines_dir={settings.baselines_dir}")
    return (*arguments, "-o", "mlhpc_here=true") if settings.here else arguments


def _history(text: str) -> str:
    if text not in HISTORY:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(HISTORY)}")
    return text


def _overrides(texts: Sequence[str]) -> Mapping[str, str]:
    if not texts:
        return {}
    from pytest_mlhpc.config.overrides import parse
    from pytest_mlhpc.errors import UsageError

    try:
        return parse(texts)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _against(texts: Sequence[str] | None) -> Against | None:
    if not texts:
        return None
    from pytest_mlhpc.config.overrides import parse_against
    from pytest_mlhpc.errors import UsageError

    try:
        return parse_against(texts)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _duration(text: str) -> float:
    from pytest_mlhpc.config.quantities import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _wait(text: str) -> float:
    return 0.0 if re.fullmatch(r"0+[smhd]?", text) else _duration(text)


def _session(text: str) -> str:
    """Refuse a path of tests, which ``--mlhpc-resume suites/`` would take for the id."""
    if text and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no id of a session; to go on with all that was left, put paths first: pytest {text} --mlhpc-resume"
        )
    return text


def _budget(text: str) -> str:
    from pytest_mlhpc.jobs.budget import parse_limit

    try:
        parse_limit(text)
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
    """Parse for argparse, which puts a ValueError's text aside: the useful text travels in its own error."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, found {number}")
    return number
