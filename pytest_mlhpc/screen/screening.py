"""One screening: run a program or look into a running job, and say what limits it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import InfrastructureError, StoreError
from pytest_mlhpc.node.telemetry import hook
from pytest_mlhpc.node.telemetry.devices import find_devices
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.screen import hook_output, run, usage, watchers
from pytest_mlhpc.screen.hook_output import TrainingTrace
from pytest_mlhpc.screen.limits import ProgramEvidence, judge
from pytest_mlhpc.screen.report import report_data, report_lines
from pytest_mlhpc.screen.run import hook_folder
from pytest_mlhpc.screen.usage import find_ranks
from pytest_mlhpc.store.text import count, object_text

HOOK = Path(hook.__file__).parent


@dataclass(frozen=True)
class Options:
    """What is looked at, and how."""

    seconds: float
    interval: float
    profile: str = "off"
    stop: bool = False
    page: Path | None = None
    job: str | None = None
    pods: Sequence[str] = ()
    namespace: str = ""
    container: str = ""
    python: str = "python3"
    as_json: bool = False  #: print one object; the program's standard output goes to standard error


def screen_program(options: Options, program: Sequence[str]) -> int:
    """Run a program, say what limits it, and return its exit code."""
    devices = find_devices()
    with hook_folder() as folder:
        try:
            wrapped = run.ScreenedProgram(
                program,
                environment(os.environ, folder, options.profile),
                devices,
                options.interval,
                output=sys.stderr.fileno() if options.as_json else None,
            )
        except FileNotFoundError:
            say(f"there is no program {program[0]!r}")
            return run.NOT_FOUND
        except OSError as error:
            say(f"{program[0]!r} cannot be run: {error.strerror}")
            return run.NOT_EXECUTABLE
        try:
            ended = wrapped.watch(options.seconds)
            missing = [] if wrapped.samples and wrapped.samples[-1].devices else [f"devices ({devices.text})"]
            what = Path(program[0]).name if len(program) == 1 else " ".join(program)
            try:
                _report(options, _short(what), wrapped.samples, hook_output.read_traces(folder), missing)
            except Exception as error:  # noqa: BLE001 - the program would die with us, of a mistake of ours
                say(f"no result: {type(error).__name__}: {error}")
            shutil.rmtree(folder, ignore_errors=True)  # the hook notices, and writes no more
            if ended is None:
                ended = wrapped.stop() if options.stop else wrapped.wait()
        finally:
            wrapped.close()
    return run.leave(ended, say)


def _print(data: Mapping[str, Any]) -> None:
    """Print the object for programs; who has gone away loses it and nothing else."""
    try:
        sys.stdout.write(object_text("screen", data))
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:
        say(f"the object cannot be printed: {error}")
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - else Python tries again at its end, and changes the exit code


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


def screen_running(options: Options) -> int:
    """Look into a running job or pods, and say what limits them.

    Raises:
        InfrastructureError: nothing of the job or pod was seen.
    """
    if options.job is not None:
        commands = [watchers.slurm_argv(options.job, options.python)]
        what = f"job {options.job}"
    else:
        commands = [
            watchers.pod_argv(pod, options.namespace, options.container, options.python)
            for pod in options.pods
        ]
        what = f"pod {', '.join(options.pods)}"
    samples, wrong = watchers.watch(commands, options.seconds, options.interval)
    if not any(sample.processes for sample in samples):
        why = "; ".join(wrong) or "no process of it is visible: it belongs to another user, or has ended"
        raise InfrastructureError("nothing_seen", f"{what}: {why}")
    missing = ["steps and torch's profiler (they are only known of programs that screening starts)", *wrong]
    _report(options, what, samples, (), missing)
    return 0


def _report(
    options: Options,
    what: str,
    samples: Sequence[Sample],
    spoken: Sequence[TrainingTrace],
    missing: Sequence[str],
) -> None:
    if len(samples) < 2:
        page = "" if options.page is None else "; no page was written"
        why = f"ended too soon to say what limits it ({count(len(samples), 'sample')})"
        say(f"{what} {why}{page}")
        if options.as_json:
            _print(report_data(what, None, (), [*missing, f"what limits it: it {why}"]))
        return
    evidence = see(samples, spoken)
    findings = judge(evidence)
    missing = [*missing, *not_reported(options, spoken)]
    lines = report_lines(what, evidence, findings, missing)
    if options.as_json:
        _print(report_data(what, evidence, findings, missing))
    else:
        for line in lines:
            say(line)
    if options.page is not None:
        _write_page(options.page, lines, samples, spoken)


def see(samples: Sequence[Sample], spoken: Sequence[TrainingTrace]) -> ProgramEvidence:
    """Return what samples and hook have to say of the time that counts: from the first step that was told."""
    first = min((one.ends[0] for one in spoken if one.ends), default=None)
    last = max((one.ends[-1] for one in spoken if one.ends), default=None)
    counted = usage.within(samples, first)
    return ProgramEvidence(
        seconds=max(counted[-1].time_s - counted[0].time_s, 0.0),
        ranks=find_ranks(usage.processes(counted), spoken),
        nodes=usage.nodes(counted, last),
        devices=usage.devices(counted),
    )


def not_reported(options: Options, spoken: Sequence[TrainingTrace]) -> list[str]:
    """Return what the hook could not tell, and why."""
    if options.job or options.pods:
        return []
    notes = list(dict.fromkeys(note for one in spoken for note in one.notes))
    if not any(one.ends for one in spoken):
        return notes or ["steps (no process took an optimizer's step in Python with torch)"]
    if options.profile != "off" and not notes and not any(one.profile for one in spoken):
        return ["torch's profiler (too few steps; see --profile and --seconds)"]
    return notes


def _write_page(
    path: Path, lines: Sequence[str], samples: Sequence[Sample], spoken: Sequence[TrainingTrace]
) -> None:
    from pytest_mlhpc.screen.report import charts, html_of
    from pytest_mlhpc.store.locations import replace_file

    try:
        replace_file(path, html_of(lines, charts(samples, spoken)))
    except StoreError as error:  # the program's exit code is worth more
        say(str(error))
    else:
        say(f"curves are in {path}")


def _short(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
