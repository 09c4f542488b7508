"""The job script of one allocation as text, the arguments of its launchers and containers, and its preview.

Two grammars meet in a job script. Its first lines are read by the scheduler (:class:`ScriptRules`); everything below is read by
bash (``shlex.quote``). Nothing here reads or writes a file; only the preview starts a process, bash, to check the syntax.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from shlex import quote
from typing import Any, Final

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.files import EXIT_UNSAFE
from pytest_mlhpc.node.protocol.plan import JobRules, Plan, RunPlan

#: Exit code of the job -> the step of its set-up that failed before the batch began. The batch itself has 74, 78 and 143.
FAILED_STEPS: Final = {
    70: "setup",
    71: "modules",
    72: "venv",
    73: "conda",
    76: "python",
    77: "shared directory",
    EXIT_UNSAFE: "unsafe directory",
}
#: Containers that srun itself starts, so that ranks are in them from the beginning.
STARTED_BY_SRUN: Final = frozenset({"pyxis", "enroot", "edf"})
#: Options by which Apptainer and Singularity give devices to a container (apptainer.org, "GPU Support").
_DEVICE_OPTIONS: Final = {"cuda": ("--nv",), "rocm": ("--rocm",)}
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
_PYTHON_CHECK: Final = "import sys; sys.exit(sys.version_info < (3, 9))"
#: bash reads a script of some kilobytes in milliseconds.
_BASH_LIMIT_S: Final = 30
#: Stands for the state directory of a session.
_EXAMPLE_STATE_DIR: Final = "/STATE"


@dataclass(frozen=True)
class ScriptRules:
    """What differs between the job scripts of schedulers.

    ``output`` is the file of the job's own output, in the plan's directory. ``directives`` returns the lines for the scheduler of
    a job with the given plan, partition, environment and unique name. ``launcher_options`` returns further arguments of the
    launcher, given partition, environment, folders that containers must see, launcher and ranks on a node. ``prologue`` are lines
    of bash before the set-up of the software. ``batch`` is the module that the script starts, ``job`` tells it of its nodes.
    """

    output: str
    directives: Callable[[Plan, Partition, Environment, str], Sequence[str]]
    launcher_options: Callable[..., tuple[str, ...]]
    prologue: tuple[str, ...] = ()
    batch: str = "pytest_mlhpc.node.batch.main"
    job: JobRules | None = None


def render_script(
    plan: Plan,
    partition: Partition,
    environment: Environment,
    rules: ScriptRules,
    *,
    name: str,
    lines_dir: str,
    payload: str | None,
) -> str:
    """Return the job script that carries out *plan*, whose file lies in its directory.

    *name* is the unique name of the job, *lines_dir* the folder of the batch's output lines, *payload* the zip for PYTHONPATH
    (None: the interpreter has this package). All paths are as the nodes see them.

    Raises:
        UsageError: a name or path holds a character that a job script cannot hold.
    """
    for what, text in (("job name", name), ("directory", plan.directory), ("directory", lines_dir)):
        _refuse_characters(what, text, _CONTROL)
    _refuse_characters("payload", payload or "", re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff:]"))
    directives = rules.directives(plan, partition, environment, name)
    lines = ["#!/bin/bash", *directives, "", *_prologue(), *rules.prologue, *_software_setup(environment)]
    lines += _start_batch(
        plan,
        [batch_python(partition, environment), "-m", rules.batch],
        lines_dir,
        payload,
        key=partition.scheduler,
    )
    return "\n".join(lines) + "\n"


def batch_python(partition: Partition, environment: Environment) -> str:
    """Return the interpreter of the batch, which runs on the host even where ranks run in containers."""
    named = partition.scheduler_options.get("batch_python")
    return str(named or ("python3" if container_of(environment) else environment.python))


def _refuse_characters(what: str, text: str, bad: re.Pattern[str]) -> None:
    if found := bad.search(text):
        raise UsageError(f"{what} {text!r:.200} holds {found.group()!r}, which a job script cannot say")


def _prologue() -> list[str]:
    return [
        "fail() {",
        """    printf 'mlhpc: %s: %s\\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2""",
        '    exit "$1"',
        "}",
    ]


def _software_setup(environment: Environment) -> Iterator[str]:
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


def with_software(argv: Sequence[str], environment: Environment) -> list[str]:
    """Return *argv* as arguments of a shell that first sets up the software of *environment*, as a job script does.

    They are positional arguments, of which the shell reads nothing.
    """
    lines = list(_software_setup(environment))
    return (
        ["bash", "-c", "\n".join([*_prologue(), *lines, 'exec "$@"']), "build", *argv]
        if lines
        else list(argv)
    )


def without_software(environment: Environment) -> Environment:
    """Return *environment* without the software that a job script sets up; the batch has an interpreter that does without."""
    extra = {
        name: value for name, value in environment.extra.items() if name not in {"setup", "venv", "conda"}
    }
    alone = not environment.extra.keys() & {"venv", "conda"} and environment.python.startswith("/")
    return replace(environment, modules=(), extra=extra, python=environment.python if alone else "python3")


def _start_batch(
    plan: Plan, batch: Sequence[str], lines_dir: str, payload: str | None, *, key: str
) -> Iterator[str]:
    """Yield the lines that start the batch, after checks that it can run."""
    python, file = batch[0], str(PurePosixPath(plan.directory, "plan.json"))
    required: Sequence[str] = [file, *([payload] if payload else [])]
    yield ""
    for path in required:
        yield _or_fail(f"[ -r {quote(path)} ]", 77, f"cannot read {path}: set shared_directory under {key}:")
    if payload:
        yield _or_fail(
            f"[ -O {quote(payload)} ]", EXIT_UNSAFE, f"{payload} belongs to another user, so it is not run"
        )
        yield f'export PYTHONPATH={quote(payload)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield _or_fail(f"command -v {quote(python)} >/dev/null", 76, f"there is no interpreter {python}")
    older = f"{python} does not run or is older than Python 3.9; see batch_python under {key}:"
    yield _or_fail(f"{quote(python)} -c {quote(_PYTHON_CHECK)}", 76, older)
    argv = [*batch, "--lines", lines_dir, file]
    yield f"exec {' '.join(map(quote, argv))}"


def _or_fail(command: str, code: int, text: str) -> str:
    return f"{command} || fail {code} {quote(text)}"


def container_of(environment: Environment) -> Mapping[str, Any] | None:
    """Return the ``container:`` of *environment* with its runtime filled in, or None."""
    container: Mapping[str, Any] | None = environment.extra.get("container")
    return {"runtime": "apptainer", "mounts": [], **container} if container else None


def rank_wrapper(
    environment: Environment, binds: Sequence[str] = (), accelerator: str = "cpu"
) -> tuple[str, ...]:
    """Return the arguments that start a container around a rank's interpreter; none where srun starts it or there is none.

    *binds* are folders that the container must see under the same path: plan, payload, data. ``accelerator`` is the
    partition's.

    Raises:
        UsageError: the runtime cannot be used in a job, or cannot take a path.
    """
    container = container_of(environment)
    if container is None or container["runtime"] in STARTED_BY_SRUN:
        return ()
    runtime, image = container["runtime"], str(container["image"])
    mounts, workdir = mounts_of(container, binds), container.get("workdir")
    if runtime in {"apptainer", "singularity"}:
        arguments = ["exec", *_DEVICE_OPTIONS.get(accelerator, ()), *(f"--bind={mount}" for mount in mounts)]
        arguments += [f"--pwd={workdir}"] if workdir else []
    elif runtime == "podman":
        # The host's network and environment, because ranks meet over TCP and know their numbers by variables.
        arguments = ["run", "--rm", "--network=host", "--ipc=host", "--env-host"]
        arguments += [f"--volume={mount}" for mount in mounts] + ([f"--workdir={workdir}"] if workdir else [])
    elif runtime == "shifter":
        arguments = [f"--image={image}", *(f"--volume={mount}" for mount in mounts)]
        return (runtime, *arguments, *([f"--workdir={workdir}"] if workdir else []), "--")
    elif runtime == "sarus":
        arguments = ["run", *(_sarus_mount(mount) for mount in mounts)]
        arguments += [f"--workdir={workdir}"] if workdir else []
    else:
        raise UsageError(
            f"environment {environment.name!r}: container runtime {runtime!r} cannot be used in a job; "
            "use apptainer, singularity, pyxis, podman, shifter, sarus or edf"
        )
    return (runtime, *arguments, image)


def mounts_of(container: Mapping[str, Any], binds: Sequence[str]) -> list[str]:
    """Return ``source:destination`` of all that the container sees: the site's own mounts first, then *binds*."""
    for path in binds:
        if bad := next((sign for sign in ":," if sign in path), ""):
            raise UsageError(
                f"{path!r} cannot be mounted in a container: its name holds {bad!r}; choose another shared_directory"
            )
    return [*container["mounts"], *(f"{path}:{path}" for path in dict.fromkeys(binds))]


def _sarus_mount(mount: str) -> str:
    source, _, destination = mount.partition(":")
    return f"--mount=type=bind,source={source},destination={destination or source}"


def preview_script(partition: Partition, environment: Environment, rules: ScriptRules) -> str:
    """Return the job script for a run with a rank on each device (CPUs: one) of two nodes, if so many are given.

    Further arguments of srun and the command before ranks are comments at the end.

    Raises:
        UsageError: it cannot be made, or bash cannot parse it (the mistake is in ``setup:``).
    """
    state = PurePosixPath(partition.scheduler_options.get("shared_directory") or _EXAMPLE_STATE_DIR)
    plan = _example_plan(partition, str(state / "runs" / "SESSION" / "ALLOCATION"))
    where = f"environment {environment.name}"
    try:
        script = render_script(
            plan,
            partition,
            environment,
            rules,
            name="mlhpc-ALLOCATION",
            lines_dir=str(state / "runs" / "SESSION" / "lines"),
            payload=str(state / "payload" / "SHA256.zip"),
        )
        options = rules.launcher_options(partition, environment, [str(state)])
        wrapper = rank_wrapper(environment, [str(state)], partition.accelerator)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if complaint := _bash_errors(script):
        raise UsageError(f"{where}: bash cannot read the job script; look at `setup`: {complaint}")
    return script + "".join(
        f"# {what}: {' '.join(arguments)}\n"
        for what, arguments in (("srun is told", options), ("ranks are started by", wrapper))
        if arguments
    )


def _example_plan(partition: Partition, directory: str) -> Plan:
    nodes = min(2, partition.nodes.max)
    each = 1 if partition.accelerator == "cpu" else max(1, partition.nodes.devices)
    run = RunPlan(
        run_id="RUN",
        nonce="",
        attempt=0,
        workload="command",
        parameters={},
        nodes=nodes,
        ranks=nodes * each,
        cores_per_rank=max(1, partition.nodes.cores // each),
        device_type=partition.accelerator,
        launcher=partition.launcher,
        time_limit_s=partition.time_limit_s,
        steps=0,
        warmup_steps=0,
    )
    return Plan("ALLOCATION", "SHA256", directory, nodes, partition.time_limit_s, (run,))


def _bash_errors(script: str) -> str:
    """Return the syntax errors that bash finds, empty without bash. Nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        return ""
    try:
        done = subprocess.run(
            [bash, "--norc", "-n"],
            input=script.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_BASH_LIMIT_S,
            check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    # An open here-document is only a warning, and would take the rest of the script for its text.
    return " ".join(done.stderr.decode(errors="replace").split())[:400]
