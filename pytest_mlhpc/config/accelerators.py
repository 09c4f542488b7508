"""Which accelerators this machine has: a look into /dev, and only if something is there a process that asks torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pytest_mlhpc.node.foreign import read_json

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

    They are kept below *state_dir*/cache (if given) for this boot, as long as that torch installation is the same. That there
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
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd="/",  # -c puts the working directory first on the path; nothing of ours may be imported from there
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        return Accelerators(reason=f"{python!r} cannot be started to ask torch: {error.strerror}"), ""
    try:
        out, err = process.communicate(timeout=PROBE_LIMIT_S + 5)
    except BaseException as error:
        _kill_group(process)
        if isinstance(error, subprocess.TimeoutExpired):
            return Accelerators(reason=f"torch of {python!r} did not answer within {PROBE_LIMIT_S} s"), ""
        raise
    return _answer(python, process.returncode, out, err)


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


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
