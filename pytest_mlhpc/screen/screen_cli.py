"""``mlhpc screen``: run any program and say what limits it, or look at a running job."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import InfrastructureError, StoreError, UsageError
from pytest_mlhpc.screen import attach, courses, told, watchers, words, wrap
from pytest_mlhpc.screen.findings import Seen
from pytest_mlhpc.screen.folder import told_folder
from pytest_mlhpc.screen.judge import judge
from pytest_mlhpc.screen.node.devices import find_devices
from pytest_mlhpc.screen.node.sampler import INTERVAL_S
from pytest_mlhpc.screen.node.samples import Sample
from pytest_mlhpc.screen.ranks import find_ranks
from pytest_mlhpc.screen.told import Told

#: First step under torch's profiler, and how many: by then caches are filled, and most programs get there within a minute.
PROFILE = "10:3"

HOOK = Path(__file__).with_name("hook")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options; what follows them, best after ``--``, is the program."""
    parser.usage = "mlhpc screen [OPTIONS] -- PROGRAM [ARGUMENT ...]\n       mlhpc screen [OPTIONS] --job ID | --pod NAME [...]"
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="how long to look (default: 60)"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the program then; without, it runs on to its end"
    )
    parser.add_argument(
        "--interval", type=float, default=INTERVAL_S, metavar="S", help="seconds from look to look, at least"
    )
    parser.add_argument(
        "--profile", default=PROFILE, metavar="FIRST:STEPS",
        help=f"which steps torch's profiler watches, or `off` (default: {PROFILE})",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the curves")
    parser.add_argument("--job", metavar="ID", help="look at this running Slurm job, by srun --overlap")
    parser.add_argument(
        "--pod", action="append", default=[], metavar="NAME", help="look into this running pod; repeatable"
    )
    parser.add_argument("--namespace", default="", help="of --pod (default: the kubeconfig's)")
    parser.add_argument("--container", default="", help="of --pod (default: its first)")
    parser.add_argument(
        "--python", default="python3", help="of --job and --pod: Python 3.9 or newer there (default: python3)"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="the program and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Wrap or attach. The exit code is the program's; of --job and --pod 0.

    Raises:
        UsageError: neither or both, options that cannot be.
        InfrastructureError: nothing of the job or pod was seen.
    """
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    check(args, program)
    if not program:
        return _attach(args)
    return _wrap(args, program)


def check(args: argparse.Namespace, program: Sequence[str]) -> None:
    """Refuse what cannot be done, before anything is started."""
    if bool(program) + (args.job is not None) + bool(args.pod) != 1:
        raise UsageError("say what to look at, one of: -- PROGRAM [ARGUMENT ...], --job ID, --pod NAME")
    if args.stop and not program:
        raise UsageError("--stop is for a program that screening starts: a job or a pod goes on")
    if (args.namespace or args.container) and not args.pod:
        raise UsageError("--namespace and --container are of --pod")
    if not 1 <= args.seconds <= 86_400:
        raise UsageError(f"--seconds {args.seconds:g} is not between 1 and 86400")
    if not 0.05 <= args.interval <= 60:
        raise UsageError(f"--interval {args.interval:g} is not between 0.05 and 60")
    if args.profile != "off" and not re.fullmatch(r"[1-9]\d{0,6}:[1-9]\d?", args.profile):
        raise UsageError(f"--profile {args.profile!r} is neither `off` nor FIRST:STEPS, as {PROFILE}")
    if args.html is not None:
        _check_page(args.html)


def _check_page(path: Path) -> None:
    """Refuse a page that could not be written when all has been looked at."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise UsageError(f"--html {path}: there is no folder {target.parent}")
        if target.is_dir():
            raise UsageError(f"--html {path} is a folder")
        written = target.parent if target.is_file() or not target.exists() else target  # a device, a pipe
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None
    if not os.access(written, os.W_OK):
        raise UsageError(f"--html {path}: {written} may not be written to")


def _wrap(args: argparse.Namespace, program: Sequence[str]) -> int:
    devices = find_devices()
    with told_folder() as folder:
        try:
            wrapped = wrap.Wrapped(
                program, environment(os.environ, folder, args.profile), devices, args.interval
            )
        except FileNotFoundError:
            say(f"there is no program {program[0]!r}")
            return wrap.NOT_FOUND
        except OSError as error:
            say(f"{program[0]!r} cannot be run: {error.strerror}")
            return wrap.NOT_EXECUTABLE
        try:
            ended = wrapped.watch(args.seconds)
            missing = (
                [] if wrapped.samples and wrapped.samples[-1].devices else [f"devices ({devices.words})"]
            )
            what = Path(program[0]).name if len(program) == 1 else " ".join(program)
            try:
                _report(args, _short(what), wrapped.samples, told.read_told(folder), missing)
            except Exception as error:  # noqa: BLE001 - the program would die with us, of a mistake of ours
                say(f"nothing can be said: {type(error).__name__}: {error}")
            shutil.rmtree(folder, ignore_errors=True)  # the hook notices, and writes no more
            if ended is None:
                ended = wrapped.stop() if args.stop else wrapped.wait()
        finally:
            wrapped.close()
    return wrap.leave(ended, say)


def say(text: str) -> None:
    """Say it to whoever looks on. Who looks away (a closed standard error, `2>&1 | head`) must not end the program."""
    try:
        sys.stderr.write(f"mlhpc screen: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - else Python tries again at its end, and changes the exit code


def environment(before: dict[str, str] | os._Environ[str], folder: Path, profile: str) -> dict[str, str]:
    """Return the program's environment: with the hook first on PYTHONPATH, and where it writes."""
    path = os.pathsep.join([str(HOOK), *([before["PYTHONPATH"]] if before.get("PYTHONPATH") else [])])
    return {
        **before,
        "PYTHONPATH": path,
        "MLHPC_SCREEN": str(folder),
        "MLHPC_SCREEN_PROFILE": "" if profile == "off" else profile,
    }


def _attach(args: argparse.Namespace) -> int:
    if args.job is not None:
        commands = [attach.slurm_argv(args.job, args.python)]
        what = f"job {args.job}"
    else:
        commands = [attach.pod_argv(pod, args.namespace, args.container, args.python) for pod in args.pod]
        what = f"pod {', '.join(args.pod)}"
    samples, wrong = watchers.look(commands, args.seconds, args.interval)
    if not any(sample.processes for sample in samples):
        why = "; ".join(wrong) or "no process of it could be seen: it belongs to another user, or has ended"
        raise InfrastructureError("nothing_seen", f"{what}: {why}")
    missing = ["steps and torch's profiler (they can be told of programs that screening starts)", *wrong]
    _report(args, what, samples, (), missing)
    return 0


def _report(
    args: argparse.Namespace,
    what: str,
    samples: Sequence[Sample],
    spoken: Sequence[Told],
    missing: Sequence[str],
) -> None:
    if len(samples) < 2:
        page = "" if args.html is None else "; no page was written"
        say(f"{what} ended too soon to say what limits it ({len(samples)} looks){page}")
        return
    seen = see(samples, spoken)
    findings = judge(seen)
    lines = words.lines(what, seen, findings, [*missing, *untold(args, spoken)])
    for line in lines:
        say(line)
    if args.html is not None:
        _write_page(args.html, lines, samples, spoken)


def see(samples: Sequence[Sample], spoken: Sequence[Told]) -> Seen:
    """Return what samples and hook have to say of the time that counts: from the first step that was told."""
    first = min((one.ends[0] for one in spoken if one.ends), default=None)
    last = max((one.ends[-1] for one in spoken if one.ends), default=None)
    counted = courses.within(samples, first)
    return Seen(
        seconds=max(counted[-1].time_s - counted[0].time_s, 0.0),
        ranks=find_ranks(courses.processes(counted), spoken),
        nodes=courses.nodes(counted, last),
        devices=courses.devices(counted),
    )


def untold(args: argparse.Namespace, spoken: Sequence[Told]) -> list[str]:
    """Return what the hook could not tell, and why."""
    if args.job or args.pod:
        return []
    notes = list(dict.fromkeys(note for one in spoken for note in one.notes))
    if not any(one.ends for one in spoken):
        return notes or ["steps (no process took an optimizer's step in Python with torch)"]
    if args.profile != "off" and not notes and not any(one.profile for one in spoken):
        return ["torch's profiler (too few steps; see --profile and --seconds)"]
    return notes


def _write_page(path: Path, lines: Sequence[str], samples: Sequence[Sample], spoken: Sequence[Told]) -> None:
    from pytest_mlhpc.screen.charts import charts
    from pytest_mlhpc.screen.page import html_of
    from pytest_mlhpc.wholefile import replace_file

    try:
        replace_file(path, html_of(lines, charts(samples, spoken)))
    except StoreError as error:  # the program's exit code is worth more
        say(str(error))
    else:
        say(f"curves are in {path}")


def _short(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
