"""The command `mlhpc vet`: the settings of one vetting from options; ``pytest_mlhpc.vet.main`` does the rest."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.vet.check import Wanted
from pytest_mlhpc.vet.policy import Bound
from pytest_mlhpc.vet.settings import BUDGET_S, Settings

#: Shortest deadline: below it Python alone takes most of the time, in seconds.
LEAST_BUDGET_S = 5.0

ACCELERATORS = ("auto", "cpu", "cuda", "rocm", "xpu", "ipu", "wse")

USAGE = """\
mlhpc vet [quick|deep] [option ...]    (--help lists the options)
       mlhpc vet history|apply|undo [option ...]"""

EPILOG = """\
One process on each node vets all nodes of a job:

    srun -N8 --ntasks-per-node=1 mlhpc vet quick --need 6 --out vet || exit $?
    . vet/env.sh

Alone it looks at this machine; with --system it has nodes by itself. What has
hung or never came is named. Exit codes: 0 enough nodes are fit, 1 too few,
2 wrong options, 3 it cannot be told (unknown counts as unfit unless
--unknown warn), 4 a defect of ours, or the deadline.

`mlhpc vet history` lists nodes that were unfit before, `mlhpc vet apply DIR`
takes unfit ones out of service, and `mlhpc vet undo` gives them back.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument(
        "level", nargs="?", choices=("quick", "deep"), default="quick",
        help="quick: below a minute; deep: minutes, with every pair of nodes, so that slow links have names",
    )  # fmt: skip
    _add_judgement(parser)
    _add_nodes(parser)
    _add_outside(parser.add_argument_group("from outside of a job"))
    _add_job(parser.add_argument_group("what stops large jobs (--for job)"))


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--need", type=int, default=0, metavar="N", help="how many nodes must be fit (default: all)")
    add("--budget", type=float, metavar="SECONDS",
        help="deadline, by which checks are chosen too (default: quick 60, deep 600)")  # fmt: skip
    add("--out", default="", metavar="DIR",
        help="folder for verdict.json, exclude.txt, nodelist.txt, env.sh, junit.xml ...")  # fmt: skip
    add("--policy", type=Path, metavar="FILE.toml",
        help="bounds in the place of ours, with source and date each")  # fmt: skip
    add("--unknown", choices=("fail", "warn"), default="fail",
        help="whether a node that cannot be judged may be used")  # fmt: skip
    add("--max-age", default="", metavar="TIME",
        help="use a verdict on these nodes that is younger, such as 30m or 12h, if the state directory has one")  # fmt: skip
    add("--apply", action="store_true", help="drain or cordon unfit nodes, with the reason, where we may")


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--accelerator", choices=ACCELERATORS, default="auto",
        help="what the nodes have (default: what is found)")  # fmt: skip
    add("--devices", type=int, metavar="N", help="how many accelerators each node must have")
    add("--expect", action="append", default=[], metavar="NAME=VALUE",
        help="what each node must have, such as cores=64, memory=500GiB, model=H100, driver=550 (again for more)")  # fmt: skip
    add("--python", default="", metavar="PROGRAM", help="interpreter that has torch (default: this one)")
    add("--no-load", action="store_true", help="compute nothing: look at each node only")


def _add_outside(outside: argparse._ArgumentGroup) -> None:
    add = outside.add_argument
    add("--system", default="", metavar="NAME[:PARTITION]",
        help="have nodes of systems.yaml, vet them, give them back")  # fmt: skip
    add("--nodes", type=int, metavar="N", help="how many (default 1)")
    add("--systems-file", metavar="FILE", help="that file instead of what is found")


def _add_job(job: argparse._ArgumentGroup) -> None:
    add = job.add_argument
    add("--for", dest="purpose", choices=("job",), default="",
        help="look at what the job will use, too")  # fmt: skip
    add("--hours", type=float, default=0.0, metavar="H", help="how long the job will run")
    add("--ranks", type=int, default=0, metavar="N", help="processes that the job will have on each node")
    add("--checkpoint", default="", metavar="PATH", help="where it will write checkpoints")
    add("--checkpoint-size", default="", metavar="SIZE", help="how large one is, such as 40GiB")
    add("--data", default="", metavar="PATH", help="where its data lies")


def settings_of(args: argparse.Namespace) -> Settings:
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
    paths = {
        name: str(Path(value).absolute()) for name in ("checkpoint", "data") if (value := getattr(args, name))
    }
    expected = _expected(args.expect)
    wanted = Wanted(
        accelerator=args.accelerator,
        devices=args.devices,
        device_model=expected.pop("model", ""),
        cores=_count(expected.pop("cores", "")),
        memory=_size(expected.pop("memory", ""), "--expect memory=") or None,
        expect=expected,
        purpose=args.purpose,
        hours=args.hours,
        ranks=args.ranks,
        paths=paths,
        checkpoint_bytes=_size(args.checkpoint_size),
    )
    return Settings(
        level=args.level,
        need=args.need,
        budget_s=args.budget or BUDGET_S[args.level],
        out=str(Path(args.out).absolute()) if args.out else "",
        unknown=args.unknown,
        wanted=wanted,
        bounds=_bounds(args.policy),
        python=_python(args.python),
        no_load=args.no_load,
    )


def _expected(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, between, value = word.partition("=")
        if not (name.strip() and between and value.strip()):
            raise UsageError(f"--expect {word!r}: write it as NAME=VALUE, such as cores=64")
        found[name.strip()] = value.strip()
    return found


def _count(text: str) -> int | None:
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise UsageError(f"--expect cores={text}: that is no number of cores")
    return int(text) if text else None


def _size(text: str, option: str = "--checkpoint-size ") -> int:
    if not text:
        return 0
    from pytest_mlhpc.system.quantities import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{option}{text!r}: {error}") from error


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
    from pytest_mlhpc.vet.command.policy_file import read_policy

    return tuple(read_policy(path))


def _from_outside(args: argparse.Namespace) -> int:
    inside = {
        "purpose": "--for", "policy": "--policy", "max_age": "--max-age", "devices": "--devices", "python": "--python",
        "no_load": "--no-load", "budget": "--budget", "checkpoint": "--checkpoint",
    }  # fmt: skip
    if wrong := [option for name, option in inside.items() if getattr(args, name)]:
        raise UsageError(
            f"{', '.join(wrong)}: only inside a job; with --system the partition says such things (vet: in systems.yaml)"
        )
    nodes = 1 if args.nodes is None else args.nodes
    if nodes < 1 or not 0 <= args.need <= nodes:
        raise UsageError(
            f"--nodes {nodes} --need {args.need}: give at least 1 node, and need no more than there are"
        )
    from pytest_mlhpc.vet.command import outside

    options = (f"--systems-file={Path(args.systems_file).absolute()}",) if args.systems_file else ()
    # What nobody has asked for, the partition says.
    unknown = "warn" if args.unknown == "warn" else ""
    verdicts, code = outside.vet(outside.Outside(args.system, nodes, args.level, args.need, unknown, options))
    code = max(code, outside.show(verdicts, args.out))
    if args.apply and verdicts:
        from pytest_mlhpc.vet.command.apply import apply, keeper_of, tell

        tell(apply(outside.merged(verdicts), keeper_of("auto", os.environ)))
    return code


def run(args: argparse.Namespace) -> int:
    """Vet; return the exit code of ``verdict.Exit``, and after a signal 128 and its number.

    Raises:
        UsageError: options that cannot be used.
    """
    if args.system:
        return _from_outside(args)
    if args.nodes is not None or args.systems_file:
        raise UsageError("--nodes and --systems-file are for --system; inside a job its own nodes are vetted")
    from pytest_mlhpc.payload import build
    from pytest_mlhpc.statedir import default_state_dir
    from pytest_mlhpc.vet.command.remembering import Remembering
    from pytest_mlhpc.vet.command.reuse import max_age
    from pytest_mlhpc.vet.leash import PAYLOAD
    from pytest_mlhpc.vet.main import run as vet

    settings, environ, state_dir = settings_of(args), dict(os.environ), default_state_dir(os.environ)
    if settings.python and not settings.no_load:
        environ[PAYLOAD] = str(build(state_dir).path)
    memory = Remembering(state_dir, environ, max_age(args.max_age), args.apply)
    return vet(settings, environ, memory=memory)
