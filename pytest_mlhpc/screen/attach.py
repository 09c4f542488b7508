"""How a running Slurm job or pods are entered: the command that starts a watcher on each node (``node/watch.py``), and its code.

The watcher needs nothing on the nodes but Python 3.9: its code goes in through its standard input. Commands are lists of
arguments, never a shell's.
"""

from __future__ import annotations

import os
import re
import shutil

from pytest_mlhpc.errors import InfrastructureError, UsageError
from pytest_mlhpc.provision.slurm import commands
from pytest_mlhpc.provision.slurm.client import SlurmError, SlurmUnusable

#: Longest answer of squeue, in seconds.
ASK_S = 30.0

#: Reads so many bytes of a zip from standard input, and runs the watcher from it. What travels is this text and a number.
#: The zip has no name: whoever ends the watcher, and however, leaves nothing on the node.
BOOT = """
import sys, tempfile
left = int(sys.argv.pop(1))
file = tempfile.TemporaryFile()
while left > 0:
    part = sys.stdin.buffer.read(min(left, 65536))
    if not part:
        sys.exit("the watcher's code did not arrive")
    file.write(part)
    left -= len(part)
file.flush()
sys.path.insert(0, "/proc/self/fd/%d" % file.fileno())
from pytest_mlhpc.node.telemetry.watch import main
sys.exit(main(sys.argv[1:]))
"""


def code() -> bytes:
    """Return the zip that the watcher runs from: the node's half of screening, and what it imports."""
    from pytest_mlhpc.provision import payload

    wanted = ("pytest_mlhpc/__init__.py", "pytest_mlhpc/node/__init__.py", "pytest_mlhpc/node/foreign.py",
              "pytest_mlhpc/node/protocol/", "pytest_mlhpc/node/telemetry/")  # fmt: skip
    own = [(name, path) for name, path in payload.own_files() if name.startswith(wanted)]
    return payload.pack(dict(sorted([*own, *payload.nvml()])))


def slurm_argv(job: str, python: str) -> list[str]:
    """Return the command that starts a watcher on each node of a running job.

    Raises:
        UsageError: there is no such job, or it does not run.
        InfrastructureError: Slurm does not answer.
    """
    if not re.fullmatch(r"\d{1,12}([_+]\d{1,6})?", job):
        raise UsageError(f"--job {job!r} is no id of a Slurm job, which is a number (4711, 4711_2, 4711+1)")
    if shutil.which("srun") is None or shutil.which("squeue") is None:
        raise UsageError("--job needs srun and squeue: run it where jobs are submitted, on a login node")
    argv = ["squeue", "--noheader", "--jobs", job, "--format", "%T|%D|%A"]
    try:
        asked = commands.run_command(argv, commands.command_environment(os.environ), ASK_S)
        unknown = "Invalid job id" in asked.err
        if asked.code != 0 and not unknown:
            raise commands.command_error(argv, asked)
    except SlurmUnusable as error:
        raise UsageError(f"{error}: run it on a login node, with SLURM_CONF as jobs are submitted") from error
    except SlurmError as error:
        raise InfrastructureError("scheduler_error", f"Slurm does not answer: {error}") from error
    lines = asked.out.split()
    if unknown or not lines:
        raise UsageError(
            f"Slurm knows no job {job} that has not ended: {asked.err.strip() or 'squeue shows nothing'}"
        )
    state, nodes, own = lines[0].split("|")
    if state != "RUNNING":
        raise UsageError(f"job {job} is {state}: only what runs can be looked at")
    return [
        *(
            "srun",
            "--overlap",
            f"--jobid={job}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
        ),
        *("--cpu-bind=none", "--quiet", "--job-name=mlhpc-screen", python, "-c", BOOT),
        *(str(len(code())), "--job", own),
    ]


def pod_argv(pod: str, namespace: str, container: str, python: str) -> list[str]:
    """Return the command that starts a watcher in a running pod.

    Raises:
        UsageError: a name cannot be one, or kubectl is missing.
    """
    for what, name in (("--pod", pod), ("--namespace", namespace), ("--container", container)):
        if (name or what == "--pod") and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise UsageError(
                f"{what} {name!r} is no name of Kubernetes: lower-case letters, digits, hyphens, dots"
            )
    if shutil.which("kubectl") is None:
        raise UsageError("--pod needs kubectl, with a kubeconfig that may exec in the pod's namespace")
    where = [
        *(["--namespace", namespace] if namespace else []),
        *(["--container", container] if container else []),
    ]
    return ["kubectl", "exec", "--stdin", pod, *where, "--", python, "-c", BOOT, str(len(code()))]
