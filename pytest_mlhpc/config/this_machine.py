"""What this machine has: cores, memory, CPU model and accelerators, as far as affinity and control groups allow."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pytest_mlhpc.config.model import NodeType
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import run_to_end

#: Version 1 says "no limit" by the largest page-aligned number; no machine has an exbibyte.
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class LocalMachine:
    """``cores`` that this process may keep busy, ``memory`` in bytes that it may use, and the CPU's own name."""

    cores: int
    memory: int
    cpu_model: str


def read_machine(root: Path = Path("/"), affinity: int | None = None) -> LocalMachine:
    """Return this machine. *root* holds ``proc``; *affinity* is the number of cores that may be used."""
    allowed = affinity if affinity is not None else len(os.sched_getaffinity(0))
    cores, memory = float(allowed), float(_memory_total(root))
    for folder, version in _control_groups(root):
        cores = min(cores, _quota(folder, version))
        memory = min(memory, _memory_limit(folder, version))
    # Half a core's quota is no core of its own: rounded down, so that ranks are not throttled.
    return LocalMachine(max(1, int(cores)), int(memory), cpu_model(root))


def cpu_model(root: Path = Path("/")) -> str:
    """Return the CPU's name as /proc/cpuinfo tells it; ARM tells numbers only, others perhaps nothing."""
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), " ".join(value.split()))
    for name in ("model name", "cpu", "uarch"):  # x86, POWER, RISC-V
        if fields.get(name):
            return fields[name]
    if "CPU implementer" in fields:
        return f"{platform.machine()} {fields['CPU implementer']}/{fields.get('CPU part', '?')}"
    return platform.machine() or "unknown"


def fingerprint(machine: LocalMachine, nodes: NodeType) -> str:
    """Return the text that tells this machine from others, fit for a file name.

    CPU model, cores and memory in GiB (of *nodes*: what the partition uses), and accelerators if any.
    """
    parts = [machine.cpu_model, f"{nodes.cores} cores", f"{round(nodes.memory / 2**30)} GiB"]
    if nodes.devices:
        parts.append(f"{nodes.devices} x {nodes.device_model or 'unknown'}")
    return "_".join(_slug(part) for part in parts)


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm|c)\)", "", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:64]


def _memory_total(root: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield every folder, own and ancestors', whose limits hold for this process, with the version of its files."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for kind, options, mounted, point in mounts:
            version = 2 if kind == "cgroup2" else 1
            wanted = set(controllers.split(",")) & {"cpu", "memory"}
            if (version == 2) != (not controllers) or (version == 1 and not wanted & options):
                continue
            # The mount may show only a part of the tree (in containers): what is above cannot be read.
            inside = os.path.relpath(path, mounted) if path.startswith(mounted) else "."
            folder = root / point.lstrip("/")
            yield folder, version
            for part in Path(inside).parts:
                folder /= part
                yield folder, version


def _mounts(root: Path) -> Iterator[tuple[str, set[str], str, str]]:
    """Yield type, super options, root within the file system, and mount point of every cgroup mount."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and len(right) >= 3 and right[0] in {"cgroup", "cgroup2"}:
            yield right[0], set(right[2].split(",")), _unescape(left[3]), _unescape(left[4])


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _quota(folder: Path, version: int) -> float:
    """Return the cores that the bandwidth limit of *folder* allows, infinite where there is none."""
    if version == 2:
        fields = _read(folder / "cpu.max").split()
    else:
        fields = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(fields) != 2 or not all(word.isdigit() for word in fields) or int(fields[1]) == 0:
        return float("inf")  # "max", -1, or no such controller
    return int(fields[0]) / int(fields[1])


def _memory_limit(folder: Path, version: int) -> float:
    text = _read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
    return float(text) if text.isdigit() and int(text) < _NO_LIMIT else float("inf")


def _read(path: Path) -> str:
    """Return the text of a file of the kernel, empty where it does not exist or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


#: Importing torch from a cold shared file system can take a minute; a driver that hangs longer is of no use.
PROBE_LIMIT_S: Final = 120
#: Device files of NVIDIA, AMD and Intel GPUs. A laptop's display chip has a render node too: torch is asked then.
_DEVICE_FILES: Final = ("nvidia[0-9]*", "kfd", "dri/renderD*")
#: These change what torch sees.
_VISIBLE: Final = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "LD_LIBRARY_PATH",
    "PYTHONPATH",
)  # fmt: skip


@dataclass(frozen=True)
class Accelerators:
    """What torch sees: ``kind`` is cuda, rocm or xpu, or empty with the ``reason`` why there is none."""

    kind: str = ""
    models: tuple[str, ...] = ()
    reason: str = ""

    @property
    def model(self) -> str:
        """The devices' common name, or all their names."""
        return " + ".join(sorted(set(self.models)))


def device_files(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the device files that may belong to an accelerator."""
    return tuple(sorted(str(path) for pattern in _DEVICE_FILES for path in dev.glob(pattern)))


def find_accelerators(
    python: str, state_dir: Path | None, environ: Mapping[str, str], dev: Path = Path("/dev")
) -> Accelerators:
    """Return the accelerators that torch of the interpreter *python* sees.

    They are cached below *state_dir*/cache (if given) for this boot, as long as that torch installation is the same. That there
    are none is asked again each time: a driver may have been mended.
    """
    files = device_files(dev)
    if not files:
        return Accelerators(
            reason="it has no device file of an accelerator (/dev/nvidia*, /dev/kfd, /dev/dri/renderD*)"
        )
    asked = [python, *files, *(f"{name}={environ.get(name, '')}" for name in _VISIBLE)]
    key = hashlib.sha256("\0".join(asked).encode()).hexdigest()[:16]
    cache = state_dir / "cache" / f"accelerators-{_boot_id()}-{key}.json" if state_dir is not None else None
    if cache is not None and (known := _cached(cache)) is not None:
        return known
    found, torch_file = _ask(python, environ)
    if cache is not None and torch_file and found.kind:
        _store(cache, found, torch_file)
    return found


def _ask(python: str, environ: Mapping[str, str]) -> tuple[Accelerators, str]:
    """Run the probe. Returns with its answer the file by which to see that torch was replaced, empty on failure."""
    # The program is handed over as text: this package need not be importable by an environment's interpreter.
    source = Path(__file__).parent.parent.joinpath("node", "worker", "probe.py").read_text(encoding="utf-8")
    argv = [python, "-c", source, str(PROBE_LIMIT_S)]
    # -c puts the working directory first on the path; nothing of ours may be imported from there.
    try:
        done = run_to_end(argv, PROBE_LIMIT_S + 5, cwd="/", env=dict(environ))
    except OSError as error:
        return Accelerators(reason=f"{python!r} cannot be started to ask torch: {error.strerror}"), ""
    except subprocess.TimeoutExpired:
        return Accelerators(reason=f"torch of {python!r} did not answer within {PROBE_LIMIT_S} s"), ""
    return _answer(
        python, done.returncode, *(text.decode(errors="replace") for text in (done.stdout, done.stderr))
    )


def _answer(python: str, returncode: int, out: str, err: str) -> tuple[Accelerators, str]:
    try:
        answer = read_json((out.splitlines() or [""])[-1])
        if "error" in answer:
            return Accelerators(reason=f"{python!r}: {answer['error']}"), ""
        kind, models = str(answer["kind"]), tuple(map(str, answer["models"]))
        reason = "" if kind else f"torch {answer['torch']} of {python!r} sees no accelerator"
        if not kind and answer.get("why"):
            reason += f": {answer['why']}"
        return Accelerators(kind, models, reason), str(answer["file"])
    except (ValueError, KeyError, TypeError):
        if returncode == -signal.SIGALRM:
            return Accelerators(reason=f"torch of {python!r} did not answer within {PROBE_LIMIT_S} s"), ""
        last = (err.strip().splitlines() or ["no message"])[-1]
        text = f"asking torch of {python!r} ended with status {returncode}: {last[:300]}"
        return Accelerators(reason=text), ""


def _boot_id() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return "unknown"
    return text.strip()


def _cached(path: Path) -> Accelerators | None:
    try:
        data = read_json(path.read_text(encoding="utf-8"))
        if Path(data["torch_file"]).stat().st_mtime_ns != data["torch_mtime_ns"]:
            return None
        found = data["found"]
        return Accelerators(str(found["kind"]), tuple(map(str, found["models"])), str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never asked, or damaged: ask again


def _store(path: Path, found: Accelerators, torch_file: str) -> None:
    """Keep the answer; where that is impossible (quota, read-only) the next session asks again."""
    try:
        data = {
            "found": asdict(found),
            "torch_file": torch_file,
            "torch_mtime_ns": Path(torch_file).stat().st_mtime_ns,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:
        return
