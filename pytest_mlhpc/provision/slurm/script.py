"""The job script of one allocation, as text made from data. Nothing here reads or writes a file.

Two grammars meet in it. ``#SBATCH`` lines are read by sbatch, which takes quotes and backslashes away but expands nothing
(:func:`directive`); everything below is read by bash (``shlex.quote``). Both were tried on Slurm 22.05.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from shlex import quote
from typing import Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.environment import container_of
from pytest_mlhpc.provision.slurm.options import SlurmSettings, settings_of
from pytest_mlhpc.system.model import Environment, Partition

#: Slurm writes the job's own output here, in the plan's directory.
OUTPUT: Final = "slurm.out"
#: Exit codes of the job when setting up failed before the batch began, and what failed. The batch itself has 74 and 143.
FAILED_STEPS: Final = {
    70: "setup",
    71: "modules",
    72: "venv",
    73: "conda",
    76: "python",
    77: "shared directory",
}
#: Words that sbatch reads back as they are.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./&\[\]-]+\Z")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Where `module` is defined when a batch shell does not know it: Lmod's and Environment Modules' own defaults.
_MODULE_INIT: Final = """\
if ! type module >/dev/null 2>&1; then
    for init in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash" \\
        /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        # shellcheck source=/dev/null
        if [ -r "$init" ]; then . "$init"; break; fi
    done
fi"""
_NEWER: Final = "import sys; sys.exit(sys.version_info < (3, 9))"


def render(
    plan: Plan,
    partition: Partition,
    environment: Environment,
    *,
    name: str,
    lines_dir: str,
    payload: str | None,
) -> str:
    """Return the job script that carries out *plan*, whose file lies in its directory.

    *name* is the unique name of the job, *lines_dir* where the batch reports, *payload* the zip that goes on PYTHONPATH
    (None: the interpreter has this package). All paths are as the nodes see them.

    Raises:
        UsageError: a name or path holds what no job script can say.
    """
    for what, text in (("job name", name), ("directory", plan.directory), ("directory", lines_dir)):
        _refuse(what, text, _CONTROL)
    _refuse("payload", payload or "", re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff:]"))
    settings = settings_of(partition)
    words = [*_options(plan, partition, settings, name), *_uenv(environment), *settings.sbatch]
    lines = ["#!/bin/bash", *map(directive, words), "", *_start(), *_set_up(environment)]
    lines += _batch(plan, batch_python(settings, environment), lines_dir, payload)
    return "\n".join(lines) + "\n"


def directive(word: str) -> str:
    """Return the ``#SBATCH`` line that sbatch reads back as the one argument *word* (``--name`` or ``--name=value``)."""
    if _PLAIN.match(word):
        return f"#SBATCH {word}"
    option, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH {option}{"=" if word.startswith("--") else ""}"{escaped}"'


def output_pattern(path: str) -> str:
    """Return *path* as a file name pattern of sbatch(1), in which ``%`` and a backslash mean something.

    A doubled backslash is one, and where there is one nothing else is replaced; else ``%%`` is a percent sign.
    """
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def batch_python(settings: SlurmSettings, environment: Environment) -> str:
    """Return the interpreter of the batch, which runs on the host even if ranks run in containers."""
    return settings.batch_python or ("python3" if container_of(environment) else environment.python)


def _refuse(what: str, text: str, bad: re.Pattern[str]) -> None:
    if found := bad.search(text):
        raise UsageError(f"{what} {text!r:.200} holds {found.group()!r}, which a job script cannot say")


def _options(plan: Plan, partition: Partition, settings: SlurmSettings, name: str) -> Iterator[str]:
    """Yield what sbatch is asked, but for the site's own further options."""
    nodes = plan.nodes + plan.spares
    yield f"--job-name={name}"
    said = replace(settings, nodelist=",".join(plan.nodelist) or settings.nodelist)
    for option in ("partition", "qos", "account", "reservation", "constraint", "licenses", "nodelist"):
        if value := getattr(said, option):
            yield f"--{option}={value}"
    if excluded := [word for word in (settings.exclude, *plan.excluded_nodes) if word]:
        yield f"--exclude={','.join(excluded)}"
    yield f"--nodes={nodes}"
    ranks, cores = _tasks(plan, partition)
    if settings.tasks == "sbatch":
        yield f"--ntasks-per-node={ranks}"
        yield f"--cpus-per-task={cores}"
    if settings.whole_nodes(nodes):
        yield "--exclusive"
    yield from _devices(plan, partition, settings, nodes)
    if settings.tres_per_node:
        yield f"--tres-per-node={settings.tres_per_node}"
    if settings.memory == "all":
        yield "--mem=0"
    elif isinstance(settings.memory, int):
        yield f"--mem={max(1, settings.memory >> 20)}M"
    # No --signal: Slurm sends SIGTERM at the limit anyway; a job that ended by an earlier one would not say TIMEOUT.
    yield f"--time={max(1, math.ceil(plan.time_limit_s / 60))}"
    yield f"--chdir={plan.directory}"
    yield f"--output={output_pattern(str(PurePosixPath(plan.directory, OUTPUT)))}"
    yield "--open-mode=append"
    yield "--no-requeue"
    yield "--export=NONE"
    if settings.comment:
        yield f"--comment={settings.comment}"


def _tasks(plan: Plan, partition: Partition) -> tuple[int, int]:
    """Return ranks on a node and the cores of each, of the run that needs most cores; without runs the whole node."""
    shapes = [(max(1, run.ranks // run.nodes), run.cores_per_rank) for run in plan.runs]
    return max(shapes or [(1, partition.nodes.cores)], key=lambda shape: (shape[0] * shape[1], shape[0]))


def _devices(plan: Plan, partition: Partition, settings: SlurmSettings, nodes: int) -> Iterator[str]:
    """Yield how accelerators and other generic resources are asked for."""
    count = partition.nodes.devices
    if plan.runs and not settings.whole_nodes(nodes) and partition.accelerator != "cpu":
        count = min(count, max(max(1, run.ranks // run.nodes) for run in plan.runs))
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    gres = [settings.gres] if settings.gres else []
    if count and settings.gpus == "gpus-per-node":
        yield f"--gpus-per-node={kind}{count}"
    elif count and settings.gpus == "gpus":
        yield f"--gpus={kind}{count * nodes}"
    elif count and settings.gpus == "gres":
        gres.insert(0, f"gpu:{kind}{count}")
    if gres:
        yield f"--gres={','.join(gres)}"


def _uenv(environment: Environment) -> Iterator[str]:
    uenv = environment.extra.get("uenv")
    if uenv:
        yield f"--uenv={uenv['image']}"
        if uenv.get("view"):
            yield f"--view={uenv['view']}"


def _start() -> list[str]:
    return [
        "fail() {",
        """    printf 'mlhpc: %s: %s\\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2""",
        '    exit "$1"',
        "}",
        "# With the first, srun would hand no variable on; with the second, it refuses other cores than the job's.",
        "unset SLURM_EXPORT_ENV SLURM_TRES_PER_TASK",
    ]


def _set_up(environment: Environment) -> Iterator[str]:
    """Yield the set-up of the software: the site's own lines, modules, venv, conda."""
    setup = environment.extra.get("setup", "")
    if setup or environment.modules:
        yield "\n" + _MODULE_INIT
    if setup:
        yield "# setup of the environment, as the site wrote it"
        yield setup.rstrip("\n")
        yield "# end of setup"
    if environment.modules:
        yield _or_fail("type module >/dev/null 2>&1", 71, "the shell of a job has no command module")
    for module in environment.modules:
        yield _or_fail(f"module load {quote(module)}", 71, f"module {module} cannot be loaded")
    if venv := environment.extra.get("venv"):
        yield "# shellcheck source=/dev/null"
        yield _or_fail(f". {quote(str(venv) + '/bin/activate')}", 72, f"venv {venv} cannot be activated")
    if conda := environment.extra.get("conda"):
        text = "the shell of a job has no command conda; load its module, or extend PATH in setup:"
        yield _or_fail("base=$(conda info --base)", 73, text)
        yield "# shellcheck source=/dev/null"
        yield _or_fail('. "$base/etc/profile.d/conda.sh"', 73, "conda cannot be set up")
        yield _or_fail(
            f"conda activate {quote(str(conda))}", 73, f"conda environment {conda} cannot be activated"
        )


def _batch(plan: Plan, python: str, lines_dir: str, payload: str | None) -> Iterator[str]:
    """Yield what starts the batch, after a look whether it can."""
    file = str(PurePosixPath(plan.directory, "plan.json"))
    needed: Sequence[str] = [file, *([payload] if payload else [])]
    yield ""
    for path in needed:
        yield _or_fail(f"[ -r {quote(path)} ]", 77, f"cannot read {path}: set shared_directory under slurm:")
    if payload:
        yield f'export PYTHONPATH={quote(payload)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield _or_fail(f"command -v {quote(python)} >/dev/null", 76, f"there is no interpreter {python}")
    older = f"{python} does not run or is older than Python 3.9; see batch_python under slurm:"
    yield _or_fail(f"{quote(python)} -c {quote(_NEWER)}", 76, older)
    words = [python, "-m", "pytest_mlhpc.batch.main", "--lines", lines_dir, file]
    yield f"exec {' '.join(map(quote, words))}"


def _or_fail(command: str, code: int, text: str) -> str:
    return f"{command} || fail {code} {quote(text)}"
