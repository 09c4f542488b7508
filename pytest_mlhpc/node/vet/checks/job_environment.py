"""What a job runs with: variables of communication, versions of software, data, limits of processes and of the allocation."""

from __future__ import annotations

import hashlib
import math
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.files import may_be_secret, read_json
from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.job_processes import cgroup, parse
from pytest_mlhpc.node.vet.checks.network import fabric_of, library_folders
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, is_number, or_else, size

#: What is compared, by the beginning of its name; nothing else of the environment leaves the node.
PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "UCX_", "GLOO_", "MASTER_")

#: Set to another value than these, they slow down. Sources: NCCL user guide, Environment Variables, Debugging; CUDA programming
#: guide, CUDA_LAUNCH_BLOCKING; HIP, HIP_LAUNCH_BLOCKING and AMD_SERIALIZE_KERNEL; torch.distributed, TORCH_DISTRIBUTED_DEBUG.
DEBUGGING: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_CHECKS_DISABLE": "0", "NCCL_CHECK_POINTERS": "0",
    "CUDA_LAUNCH_BLOCKING": "0", "HIP_LAUNCH_BLOCKING": "0", "AMD_SERIALIZE_KERNEL": "0", "AMD_SERIALIZE_COPY": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF INFO",
}  # fmt: skip


def safe(name: str, value: str) -> str:
    """Return ``NAME=value``, with a hash in the place of what may be a secret."""
    if may_be_secret(name):
        value = "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}={value}"


def _judge_environment(exam: Examination) -> str:
    """Give one fact for each prefix, empty ones too, so that a variable missing on one node is found."""
    environ = exam.machine.environ
    for prefix in PREFIXES:
        exam.fact(f"environment.{prefix}", _all(environ, prefix))
    left = [
        f"{name}={environ[name]}"
        for name, normal in DEBUGGING.items()
        if environ.get(name, "").upper() not in {"", *normal.split()}
    ]
    text = f"{', '.join(left)}: for debugging, and slow; unset for a real run"
    exam.judge("job.debug_variables", len(left), text)
    return "no variables are left from debugging"


def _all(environ: Mapping[str, str], prefix: str) -> str:
    return " ".join(safe(name, environ[name]) for name in sorted(environ) if name.startswith(prefix))


#: Asks an interpreter for its packages without importing any.
ASK = (
    "import json, sys; from importlib.metadata import distributions as d; "
    "print(json.dumps({'python': sys.version.split()[0], "
    "'packages': {str(x.metadata['Name']).lower(): x.version for x in d()}}))"
)

#: How long it may take, in seconds: it reads a folder for each package, at first from a slow file system.
ASK_S = 4.0

#: Packages that are named when they differ, beside torch; all others are one fact, a digest.
PACKAGES = (
    "pytorch-triton-rocm", "triton", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cuda-runtime-cu12", "transformer-engine", "flash-attn", "deepspeed", "mpi4py", "amdsmi",
)  # fmt: skip

#: Where versions are written, by fact; several files are one fact.
FILES = {
    "driver": ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"),
    "fabric_driver": ("/sys/module/mlx5_core/version", "/sys/module/cxi_core/version"),
    "kernel": ("/proc/sys/kernel/osrelease",),
    "toolkit": ("/opt/rocm/.info/version", "/usr/local/cuda/version.json"),
    "system": ("/etc/os-release",),
}

#: Libraries whose versioned file names are compared.
LIBRARIES = ("libnccl.so.*", "librccl.so.*", "libfabric.so.*", "libcudart.so.*")

#: What says which image this is. Sources: Apptainer user guide; CSCS, uenv; Slurm, --container; our own manifests.
IMAGES = (
    "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "UENV_MOUNT_LIST", "SLURM_CONTAINER", "MLHPC_IMAGE", "MLHPC_IMAGE_DIGEST",
)  # fmt: skip


def _judge_software(exam: Examination) -> str:
    """Give versions as facts; the vote over nodes is the judge's."""
    machine = exam.machine
    values = {**_python(machine, exam.context.python or "python3"), **_files(machine)}
    values["libraries"] = _libraries(machine)
    images = (f"{name}={machine.environ[name]}" for name in IMAGES if machine.environ.get(name))
    values["image"] = " ".join(images)
    for name, value in values.items():
        exam.fact(f"software.{name}", value)
    return f"{len(values)} versions are known"


def _python(machine: Machine, python: str) -> Dict[str, str]:
    done = machine.command((python, "-c", ASK), ASK_S)
    try:
        said: Any = read_json(done.output)
        packages = {str(name): str(version) for name, version in said["packages"].items()}
        found = {"python": str(said["python"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (done.errors or done.output).strip()[-200:]
        raise Unreadable(f"{python} does not say its packages: {message or error}") from error
    found["torch"] = packages.get("torch", "")
    found["device_packages"] = " ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
    listing = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    found["packages"] = f"{len(packages)} packages, {_digest(listing)}"
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _files(machine: Machine) -> Dict[str, str]:
    found = {}
    for name, paths in FILES.items():
        texts = [text for text in (or_else(machine.text, path, "") for path in paths) if text]
        value = " ".join(texts)
        found[name] = value if len(value) <= 80 and "\n" not in value else _digest(value)
    return found


def _libraries(machine: Machine) -> str:
    """Return the most exact name of each library in the first folder that has it, as the loader would find it."""
    found: List[str] = []
    folders: Tuple[str, ...] = library_folders(machine)
    for pattern in LIBRARIES:
        for folder in folders:
            names = machine.names(f"{folder}/{pattern}")
            if names:
                found.append(
                    max((name.rpartition("/")[2] for name in names), key=lambda one: (len(one), one))
                )
                break
    return " ".join(found)


#: Names of a folder that are compared; beyond it the order in which a server lists them would decide.
MOST_NAMES = 20000


def _judge_data(exam: Examination) -> str:
    """Look at ``data``, and at all paths whose names begin so."""
    troubles: List[str] = []
    paths = {key: path for key, path in exam.wanted.paths.items() if key.startswith("data") and path}
    for key, path in sorted(paths.items()):
        try:
            value = _content(exam.machine, path)
        except Unreadable as error:
            troubles.append(str(error))
            continue
        exam.fact(f"listing.{key}", value, severity=Severity.CRITICAL)
    text = f"{'; '.join(troubles)}: see whether the file system is mounted on this node, and rights"
    exam.judge("job.data_path", len(troubles), text)
    return f"{len(paths)} paths can be read" if paths else "no data was named (--data)"


def _content(machine: Machine, path: str) -> str:
    """Return what should be equal on all nodes: how many names and their digest, or a file's size.

    Raises:
        Unreadable: the data is not there, closed to us, empty or broken; as text for the user.
    """
    machine.exists(f"{path}/.")  # a folder above may be closed to us
    place = machine.path(path)
    if place.is_dir():
        names = _names(machine, path)
        if not names:
            raise Unreadable(f"the folder {path} is empty")
        first = next((name for name in names if machine.path(f"{path}/{name}").is_file()), None)
        if first is not None:
            machine.head(f"{path}/{first}", 1)
        if len(names) > MOST_NAMES:
            return f"more than {MOST_NAMES} names"
        return f"{len(names)} names, {_digest(chr(0).join(names))}"
    machine.head(path, 1)
    return f"{place.stat().st_size} bytes"


def _names(machine: Machine, path: str) -> Tuple[str, ...]:
    machine.exists(f"{path}/.mlhpc-vet")  # says why a folder is closed to us
    found = []
    try:
        with os.scandir(machine.path(path)) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) > MOST_NAMES:
                    break
    except OSError as error:
        raise Unreadable(f"the folder {path} cannot be listed: {error.strerror}", error.errno) from error
    return tuple(sorted(found))


_LINE = re.compile(r"(Max [a-z ]+?) {2,}(\S+) +(\S+)")


def soft_limits(text: str) -> Dict[str, float]:
    """Return the soft limits of a /proc/PID/limits by name, ``Max open files``; infinite where unlimited (proc(5))."""
    found = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and (match[2] == "unlimited" or is_number(match[2])):
            found[match[1]] = math.inf if match[2] == "unlimited" else float(match[2])
    return found


def _judge_limits(exam: Examination) -> str:
    """Compare the soft limits with what the ranks of this node, and of the job, need."""
    limits = soft_limits(exam.machine.text("/proc/self/limits"))
    if not limits:
        raise Unreadable("/proc/self/limits holds no known limit")
    _judge_memlock(exam, limits.get("Max locked memory", math.inf))
    limit, world = limits.get("Max open files", math.inf), exam.context.world
    text = (
        f"only {limit:.0f} files may be open in one process: ulimit -n to the hard limit, in the job script"
    )
    exam.judge("job.nofile", limit, text)
    text = f"{limit:.0f} open files are too few for the connections of {world} ranks: ulimit -n to the hard limit"
    exam.judge("job.nofile_per_rank", limit / world, text)
    _judge_tasks(exam, limits.get("Max processes", math.inf))
    stack = limits.get("Max stack size", math.inf)
    text = f"the stack may have only {size(stack)}: threads of compilers and libraries overflow it; ulimit -s 65536"
    exam.judge("job.stack", stack, text)
    core = limits.get("Max core file size", 0.0)
    pattern = or_else(exam.machine.text, "/proc/sys/kernel/core_pattern", "|")
    text = f"a crash would write all memory of each rank (limit: {size(core)}) as {pattern!r}: ulimit -c 0"
    exam.judge("job.core_dumps", 0.0 if pattern.startswith("|") or not pattern else core, text)
    return "limits are wide enough"


def _judge_memlock(exam: Examination, limit: float) -> None:
    fabric = fabric_of(exam.machine) if math.isfinite(limit) else None
    if fabric is not None and not (fabric.own or fabric.ethernet):
        limit = math.inf
    text = (
        f"only {size(limit)} of memory may be locked, which {fabric.text if fabric else 'a fabric'} needs to send from: "
        "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK; containers: --ulimit memlock=-1)"
    )
    exam.judge("job.memlock", limit, text)


def _judge_tasks(exam: Examination, limit: float) -> None:
    where, ranks = "ulimit -u", max(1, exam.wanted.ranks)
    pids = _pids_max(exam.machine)
    if pids < limit:
        limit, where = pids, "pids.max of the cgroup (Kubernetes: podPidsLimit)"
    text = f"{limit:.0f} processes and threads for {ranks} ranks: {where} is too low"
    exam.judge("job.tasks_per_rank", limit / ranks, text)


def _pids_max(machine: Machine) -> float:
    """Return the least limit of our cgroup and those above it (cgroups(7)); infinite where there is none."""
    lines = cgroup(machine, "self").splitlines()
    found = math.inf
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "pids"} or ".." in path:
            continue
        root = "/sys/fs/cgroup/pids" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            text = or_else(machine.text, "/".join([root, *parts[:depth], "pids.max"]), "")
            found = min(found, float(text) if is_number(text) else math.inf)
    return found


#: Where the manifest of docs/vetting-kubernetes.md mounts the pod's annotations, and the one that says how long it may live.
ANNOTATIONS = "/etc/podinfo/annotations"
DEADLINE = "mlhpc.active-deadline-seconds"

#: How long squeue may take, in seconds; it gives a controller up after 9 s (measured with 22.05), which is too long here.
SQUEUE_S = 4.0

#: [days-]hours:minutes:seconds, hours and minutes left out where they are none (squeue(1), %L).
_LEFT = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,6})\Z")

#: What squeue says where there is no end.
ENDLESS = ("UNLIMITED", "NOT_SET", "INVALID")


def left_by_squeue(text: str) -> Optional[float]:
    """Return the seconds left that ``squeue -o %L`` says; None: no limit.

    Raises:
        Unreadable: it says something else.
    """
    if text in ENDLESS:
        return None
    match = _LEFT.match(text)
    if not match:
        raise Unreadable(f"squeue says {text[:40]!r} of the time left")
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _judge_time(exam: Examination) -> str:
    """Ask Slurm, or the pod's annotations."""
    hours, context = exam.wanted.hours, exam.context
    if hours <= 0:
        return "the length of the run is not known (--hours)"
    if context.hosts and context.host != context.hosts[0]:
        return "only the first node asks, to spare the controller"
    left = _left(exam.machine)
    if left is None:
        return "the allocation has no end"
    text = (
        f"{left / 3600:.1f} hours are left, and the run takes {hours:g}: "
        "ask for a longer allocation, or restart from a checkpoint"
    )
    exam.judge("job.wall_time", left / (hours * 3600), text)
    return f"{left / 3600:.1f} hours are left"


def _left(machine: Machine) -> Optional[float]:
    end = machine.environ.get("SLURM_JOB_END_TIME", "")
    if is_number(end):
        return int(end) - machine.clock()
    job = machine.environ.get("SLURM_JOB_ID", "")
    if is_number(job):
        done = machine.command(("squeue", "-h", "-j", job, "-o", "%L"), SQUEUE_S)
        if done.code:
            message = (done.errors or done.output).strip()[-200:]
            raise Unreadable(f"squeue does not say how long the job has left: {message}")
        return left_by_squeue(done.output.strip())
    return _of_pod(machine)


def _of_pod(machine: Machine) -> Optional[float]:
    try:
        annotations = machine.key_values(ANNOTATIONS, "=")
    except Absent:
        return None
    deadline = annotations.get(DEADLINE, "").strip('"')
    if not deadline:
        return None
    if not is_number(deadline):
        raise Unreadable(f"{ANNOTATIONS}: {DEADLINE} is {deadline[:40]!r}, not a number of seconds")
    return int(deadline) - (machine.up_s() - parse(machine.text("/proc/1/stat")).started_s)


CHECKS = (
    Check.named("job_environment", _judge_environment),
    Check.named("job_software", _judge_software),
    Check.named("job_data", _judge_data),
    Check.named("job_limits", _judge_limits),
    Check.named("job_time", _judge_time),
)
