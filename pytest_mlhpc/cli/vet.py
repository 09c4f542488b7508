"""``mlhpc vet``: are these nodes fit for a long run? quick, deep, history, drain, undo.

``pytest_mlhpc.node.vet.main`` does the vetting; here are its settings from options.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command, CommandReport, DataCommand, NearestChoice, NounGroup
from pytest_mlhpc.config.policy import OF_NODES, PROPERTIES, trouble
from pytest_mlhpc.errors import Problem, UsageError
from pytest_mlhpc.node.protocol.plan import BUDGET_S, VetSettings
from pytest_mlhpc.node.vet.policy import Bound, ExpectedNode
from pytest_mlhpc.store.text import iso, minutes, one_line, table
from pytest_mlhpc.store.text import tell as say

if TYPE_CHECKING:
    from pytest_mlhpc.vetting.cordon import Action
    from pytest_mlhpc.vetting.history import NodeEntry, Offender

EXAMPLE = """\
srun -N8 --ntasks-per-node=1 mlhpc vet quick --need 6 --output vet || exit $?
. vet/env.sh"""

#: Shortest deadline: below it Python alone takes most of the time, in seconds.
LEAST_BUDGET_S = 5.0

ACCELERATORS = ("auto", "cpu", "cuda", "rocm", "xpu", "ipu", "wse")

#: All names of --expect, as help and message list them.
NAMES = (*OF_NODES, *PROPERTIES)
HELP = {
    "quick": "Vet the nodes of this job, or this machine, below a minute.",
    "deep": "Vet the nodes of this job, or this machine, for minutes: with every pair of nodes, so that slow links have "
    "names.",
}

EXITS = """\
Nodes that hung or did not answer are named. Exit codes: 0 enough nodes are fit, 1 too few, 2 wrong options, 3 unknown
(counts as unfit unless --unknown warn), 4 a defect of mlhpc, or the deadline, 5 healthy, but figures have no peers, no
floor and no history to be compared with. After a signal 128 and its number."""

_JUDGEMENT = (
    click.option(
        "--need", type=int, default=0, metavar="N", help="How many nodes must be fit.  [default: all]"
    ),
    click.option(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="Deadline, by which checks are chosen too.  [default: quick 60, deep 600]",
    ),
    click.option(
        "--output",
        default="",
        metavar="DIR",
        help="Folder for verdict.json, exclude.txt, nodelist.txt, env.sh, junit.xml ...",
    ),
    click.option("--json", "as_json", is_flag=True, help="For programs: one object, as verdict.json."),
    click.option(
        "--policy",
        type=Path,
        metavar="FILE.toml",
        help="Bounds in the place of ours, with source and date each.",
    ),
    click.option(
        "--unknown",
        type=NearestChoice(["fail", "warn"]),
        default="fail",
        show_default=True,
        help="Whether a node that cannot be judged may be used.",
    ),
    click.option(
        "--require-comparison",
        is_flag=True,
        help="A node whose figures cannot be compared is unknown: exit code 3 in the place of 5.",
    ),
    click.option(
        "--max-age",
        default="",
        metavar="TIME",
        help="Use a verdict on these nodes that is younger, such as 30m or 12h, if the state directory has one.",
    ),
    click.option(
        "--drain", is_flag=True, help="Take unfit nodes out of service, with the reason, where we may."
    ),
)
_NODES = (
    click.option(
        "--accelerator",
        type=NearestChoice(ACCELERATORS),
        default="auto",
        help="What the nodes have.  [default: what is found]",
    ),
    click.option("--devices", type=int, metavar="N", help="How many accelerators each node must have."),
    click.option(
        "--expect",
        multiple=True,
        metavar="NAME=VALUE",
        help=f"What each node must have, such as cores=64 or memory=500GiB (again for more). Names: {', '.join(NAMES)}.",
    ),
    click.option(
        "--python", default="", metavar="PROGRAM", help="Interpreter that has torch.  [default: this one]"
    ),
    click.option("--no-load", is_flag=True, help="Compute nothing: only check each node."),
)
_OUTSIDE = (
    click.option(
        "--system",
        default="",
        metavar="NAME[:PARTITION]",
        help="From outside of a job: have nodes of systems.yaml, vet them, give them back.",
    ),
    click.option("--nodes", type=int, metavar="N", help="With --system: how many.  [default: 1]"),
    options.systems_file,
)
_JOB = (
    click.option("--for", "purpose", type=NearestChoice(["job"]), help="Check what the job will use, too."),
    click.option(
        "--hours", type=float, default=0.0, metavar="H", help="With --for job: how long it will run."
    ),
    click.option(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="With --for job: processes that it will have on each node.",
    ),
    click.option("--checkpoint", default="", metavar="PATH", help="Where the job will write checkpoints."),
    click.option("--checkpoint-size", default="", metavar="SIZE", help="How large one is, such as 40GiB."),
    click.option("--data", default="", metavar="PATH", help="With --for job: where its data lies."),
)


@click.group(
    cls=NounGroup,
    default="quick",
    help="Are these nodes fit for a long run? One process on each node, by srun, vets all of them; alone it looks at this "
    "machine; with --system it has nodes by itself.",
    example=EXAMPLE,
)
def command() -> None:
    """Hold the verbs."""


def _add_level(level: str, short_help: str) -> None:
    """Add the command of a level."""

    def vet(**given: Any) -> int:
        return run(SimpleNamespace(level=level, **given))

    function: Callable[..., int] = vet
    for option in reversed((*_JUDGEMENT, *_NODES, *_OUTSIDE, *_JOB)):
        function = option(function)
    command.command(
        level,
        cls=Command,
        help=HELP[level],
        short_help=short_help,
        epilog=EXITS,
        example=EXAMPLE.replace("quick", level),
    )(function)


_add_level("quick", "look at all nodes of a job, below a minute; `quick` may be left out")
_add_level("deep", "minutes, with every pair of nodes, so that slow links have names")


def run(args: SimpleNamespace) -> int:
    """Vet; return the exit code of ``verdict.Exit``, and after a signal 128 and its number.

    Raises:
        UsageError: options that cannot be used.
    """
    if args.system:
        return _from_outside(args)
    if args.nodes is not None or args.systems_file:
        raise UsageError("--nodes and --systems-file are for --system; inside a job its own nodes are vetted")
    from pytest_mlhpc.node.child_process import PAYLOAD
    from pytest_mlhpc.node.vet.main import run as vet
    from pytest_mlhpc.provision.payload import build
    from pytest_mlhpc.store.locations import default_state_dir
    from pytest_mlhpc.vetting.reuse import StoredResults, max_age

    settings, environ, state_dir = settings_of(args), dict(os.environ), default_state_dir(os.environ)
    if settings.python and not settings.no_load:
        environ[PAYLOAD] = str(build(state_dir).path)
    memory = StoredResults(state_dir, environ, max_age(args.max_age), args.drain)
    return vet(settings, environ, memory=memory)


def settings_of(args: SimpleNamespace) -> VetSettings:
    """Return the settings that options mean.

    Raises:
        UsageError: a number, a path or a policy file that cannot be used.
    """
    for name in ("need", "devices", "hours", "ranks", "budget"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1e9:
            raise UsageError(f"--{name} {value:g} is no sensible number")
    if args.budget is not None and args.budget < LEAST_BUDGET_S:
        raise UsageError(f"--budget {args.budget:g} is too short: give it at least {LEAST_BUDGET_S:g} s")
    for name in ("hours", "ranks", "data"):
        if getattr(args, name) and not args.purpose:
            raise UsageError(f"--{name} is about a job: give --for job as well")
    _refuse_contradictions(args)
    paths = {
        name: str(Path(value).absolute()) for name in ("checkpoint", "data") if (value := getattr(args, name))
    }
    promised = expected(args.expect)
    wanted = ExpectedNode(
        accelerator=args.accelerator,
        devices=args.devices,
        device_model=promised.pop("model", ""),
        cores=int(promised.pop("cores", 0)) or None,
        memory=_size(promised.pop("memory", "")) or None,
        expect=promised,
        purpose=args.purpose or "",
        hours=args.hours,
        ranks=args.ranks,
        paths=paths,
        checkpoint_bytes=_size(args.checkpoint_size),
    )
    return VetSettings(
        level=args.level,
        need=args.need,
        budget_s=args.budget or BUDGET_S[args.level],
        out=str(Path(args.output).absolute()) if args.output else "",
        unknown=args.unknown,
        wanted=wanted,
        bounds=_bounds(args.policy),
        python=_python(args.python),
        no_load=args.no_load,
        require_comparison=args.require_comparison,
        as_json=args.as_json,
    )


def expected(assignments: Sequence[str]) -> dict[str, str]:
    """Return what *assignments* say, by name.

    Raises:
        UsageError: one is not NAME=VALUE, has a name that no check reads, or a value that no node can have.
    """
    found: dict[str, str] = {}
    for word in assignments:
        name, between, value = (part.strip() for part in word.partition("="))
        if not (name and between and value):
            raise UsageError(f"--expect {word!r}: write it as NAME=VALUE, such as cores=64")
        message, suggestion = trouble(name, value, NAMES)
        if message:
            raise UsageError(str(Problem(f"--expect {word}", "", message, suggestion)))
        found[name] = value
    return found


def _refuse_contradictions(args: SimpleNamespace) -> None:
    if args.require_comparison and args.unknown == "warn":
        raise UsageError("--require-comparison and --unknown warn contradict each other: give one of them")


def _size(text: str) -> int:
    if not text:
        return 0
    from pytest_mlhpc.config.quantities import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--checkpoint-size {text!r}: {error}") from error


def _python(program: str) -> str:
    if not program:
        return ""
    found = shutil.which(program)
    if found is None:
        raise UsageError(f"--python {program}: there is no such program here")
    return str(Path(found).absolute())


def _bounds(path: Path | None) -> tuple[Bound, ...]:
    if path is None:
        return ()
    from pytest_mlhpc.config.policy import read_policy

    return tuple(read_policy(path))


def _from_outside(args: SimpleNamespace) -> int:
    inside = {
        "purpose": "--for", "policy": "--policy", "max_age": "--max-age", "devices": "--devices", "expect": "--expect", "python": "--python",
        "no_load": "--no-load", "budget": "--budget", "checkpoint": "--checkpoint",
    }  # fmt: skip
    if wrong := [option for name, option in inside.items() if getattr(args, name)]:
        raise UsageError(
            f"{', '.join(wrong)}: only inside a job; with --system the partition says such things (vet: in systems.yaml)"
        )
    _refuse_contradictions(args)
    nodes = 1 if args.nodes is None else args.nodes
    if nodes < 1 or not 0 <= args.need <= nodes:
        raise UsageError(
            f"--nodes {nodes} --need {args.need}: give at least 1 node, and need no more than there are"
        )
    from pytest_mlhpc.vetting import outside

    options = ("-o", f"mlhpc_systems_file={Path(args.systems_file).absolute()}") if args.systems_file else ()
    # What nobody has asked for, the partition says.
    unknown: Literal["", "warn"] = "warn" if args.unknown == "warn" else ""
    wanted = outside.OutsideVetting(
        args.system, nodes, args.level, args.need, unknown, args.require_comparison, options
    )
    verdicts, code = outside.vet(wanted)
    code = outside.show(verdicts, args.output, as_json=args.as_json) or code
    if args.drain and verdicts:
        from pytest_mlhpc.vetting.cordon import apply, node_admin_of, print_actions

        print_actions(apply(outside.merged(verdicts), node_admin_of("auto", os.environ)))
    return code


#: Longest reason in the table, in characters; --json has all of it.
MOST_REASON = 100


@command.command(
    "history",
    short_help="what earlier vettings found, and which nodes fail again",
    cls=DataCommand,
    help="Show which nodes were unfit, repeated offenders first. Nodes unfit by what a user can mend are not listed. In "
    "--json kept_out means 24 h after the vetting, whatever exclude_for of a partition says.",
    example="mlhpc vet history --system cirrus --since 30d",
)
@click.option("--system", "place", default="", metavar="NAME[:PARTITION]", help="Only nodes of this one.")
@options.since("30d")
@click.option(
    "--forget-figures",
    metavar="REASON",
    default="",
    help="After an upgrade: learn anew what good nodes of --system NAME:PARTITION reach; nothing is deleted.",
)
@options.state_dir
def history(place: str, since_ns: int, forget_figures: str, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    from pytest_mlhpc.vetting.history import JournalQuery, node_entries_since, offenders

    now_ns = time.time_ns()
    if forget_figures:
        return _forget(state_dir, place, forget_figures, now_ns)
    system, _, partition = place.partition(":")
    where = {name: value for name, value in (("system", system), ("partition", partition)) if value}
    entries = list(node_entries_since(state_dir, JournalQuery(since_ns, now_ns, where, say)))
    bad, good = offenders(entries)
    out = _excluded(entries, now_ns)
    data = {"since": iso(since_ns), "nodes": [_to_json(node, out) for node in bad], "never_unfit": good}
    return CommandReport(text_of(bad, good, out, since_ns), data)


def _forget(state_dir: Path, place: str, reason: str, now_ns: int) -> CommandReport:
    system, colon, partition = place.partition(":")
    if not colon or not reason.strip():
        raise UsageError("--forget-figures needs a reason, and --system NAME:PARTITION for whose figures")
    from pytest_mlhpc.store.record import user_name
    from pytest_mlhpc.vetting.history import EpochEntry, forget

    forget(state_dir, EpochEntry(now_ns, system, partition, reason.strip(), user_name()))
    since = {"system": place, "learned_anew_since": iso(now_ns)}
    return CommandReport(f"figures of {place} are learned anew from {minutes(now_ns)} on\n", since)


def text_of(bad: Sequence[Offender], good: int, out: set[tuple[str, str, str]], since_ns: int) -> str:
    """Return a table for people."""
    if not bad:
        if not good:
            return f"no node was vetted since {minutes(since_ns)}\n"
        return f"{'1 node was' if good == 1 else f'{good} nodes were'} vetted since {minutes(since_ns)}, none was unfit\n"
    rows = [("node", "system", "unfit", "last", "now", "checks", "last reason")]
    for node in bad:
        checks = ", ".join(f"{name} {times}x" for name, times in node.checks.most_common(3))
        rows.append((
            node.host, ":".join(filter(None, (node.system, node.partition))), f"{node.unfit} of {node.vettings}",
            minutes(node.last_ns), "kept out" if _key(node) in out else "", checks, one_line(node.last_reason, MOST_REASON),
        ))  # fmt: skip
    rest = f"{good} other {'node was' if good == 1 else 'nodes were'} never unfit\n"
    meant = _meaning_of_left_out() if any(_key(node) in out for node in bad) else ""
    return f"since {minutes(since_ns)}\n{table(rows)}{meant}{rest}"


def _meaning_of_left_out() -> str:
    """Return what "kept out" means: descriptions of partitions are not read here."""
    from pytest_mlhpc.vetting.history import EXCLUDE_S

    return f"kept out: of later runs, for {EXCLUDE_S / 3600:.0f} h unless the partition's exclude_for says otherwise\n"


def _excluded(entries: Sequence[NodeEntry], now_ns: int) -> set[tuple[str, str, str]]:
    """Return the nodes that are excluded from submissions now, each with its system and partition."""
    from pytest_mlhpc.vetting.history import EXCLUDE_S, unfit_now

    groups: dict[tuple[str, str], list[NodeEntry]] = {}
    for entry in entries:
        if entry.at_ns >= now_ns - int(EXCLUDE_S * 1e9):
            groups.setdefault((entry.system, entry.partition), []).append(entry)
    return {(*place, host) for place, group in groups.items() for host in unfit_now(group)}


def _key(node: Offender) -> tuple[str, str, str]:
    return node.system, node.partition, node.host


def _to_json(node: Offender, out: set[tuple[str, str, str]]) -> dict[str, object]:
    return {
        "node": node.host,
        "system": node.system,
        "partition": node.partition,
        "vettings": node.vettings,
        "unfit": node.unfit,
        "unknown": node.unknown,
        "checks": dict(node.checks.most_common()),
        "last": iso(node.last_ns),
        "last_reason": node.last_reason,
        "kept_out": _key(node) in out,
    }


@command.command(
    "drain",
    short_help="take the unfit nodes of a verdict out of service",
    cls=DataCommand,
    help="Drain or cordon the nodes that have a problem of their own by the verdict.json in DIR (the --output of a "
    "vetting). Exit code 1 if one could not be taken out of service.",
    example="mlhpc vet drain vet --most 2",
)
@click.argument("folder", type=Path, metavar="DIR")
@click.option(
    "--most",
    type=click.IntRange(0),
    metavar="N",
    help="Do nothing if more nodes are bad.  [default: a third of those vetted]",
)
@options.scheduler
def drain_nodes(folder: Path, most: int | None, scheduler: str) -> CommandReport:
    """Drain or cordon them."""
    from pytest_mlhpc.vetting.cordon import apply, fresh, left_silent, node_admin_of, node_problems

    verdict = fresh(folder)
    if not node_problems(verdict):
        return _actions(left_silent(verdict), "no node has a problem of its own: nothing to do\n")
    return _actions(apply(verdict, node_admin_of(scheduler, os.environ), most))


@command.command(
    "undo",
    short_help="give nodes back that vetting took out of service",
    cls=DataCommand,
    help="Give NODEs back to service, or all that vetting took out. Exit code 1 if one could not be given back.",
    example="mlhpc vet undo nid001234",
)
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@options.scheduler
def undo_nodes(nodes: Sequence[str], scheduler: str) -> CommandReport:
    """Give them back."""
    from pytest_mlhpc.vetting.cordon import node_admin_of, undo

    actions = undo(nodes, node_admin_of(scheduler, os.environ))
    return _actions(actions, "" if actions else "no node is out of service by us: nothing to do\n")


def _actions(actions: Sequence[Action], last: str = "") -> CommandReport:
    """Return what became of each node, and *last*; failures are reported on standard error, too."""
    from pytest_mlhpc.vetting.cordon import print_actions

    failed = [one for one in actions if one.outcome == "failed"]
    print_actions(failed)
    text = "".join(f"{one}\n" for one in actions if one not in failed) + last
    data = {"nodes": [{"node": one.host, "became": one.outcome, "what": one.text} for one in actions]}
    return CommandReport(text, data, 1 if failed else 0)
