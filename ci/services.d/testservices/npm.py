"""Fetch packages of npm into a folder that is there whole or not at all."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testcluster.errors import UnfitMachineError

_LIMIT_S = 600.0


def fetch(folder: Path, packages: Sequence[str], *options: str, tools: Sequence[str] = ()) -> None:
    """Let npm fetch *packages* into ``node_modules`` of *folder*, if that is not there.

    Args:
        folder: Made beside where it will lie, then given its name.
        packages: Each with its version, ``NAME@VERSION``.
        options: More options of ``npm install``.
        tools: Programs that are needed besides node and npm; their packages have the same names.

    Raises:
        UnfitMachineError: a tool is missing, or npm failed.
    """
    if folder.exists():
        return
    for tool in ("node", "npm", *tools):
        if shutil.which(tool) is None:
            raise UnfitMachineError(
                f"{tool} is not here; apt-get install {' '.join(['nodejs', 'npm', *tools])}"
            )
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    making.mkdir(parents=True)
    argv = [
        "npm",
        "--prefix",
        str(making),
        "install",
        "--no-audit",
        "--no-fund",
        "--silent",
        *options,
        *packages,
    ]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        if done.returncode != 0:
            raise UnfitMachineError(f"`{' '.join(argv)}` failed: {done.stderr.strip()[-1000:]}")
        with contextlib.suppress(OSError):  # another one was as fast as we
            making.rename(folder)
    except subprocess.TimeoutExpired as error:
        raise UnfitMachineError(f"`{' '.join(argv)}` did not end in {_LIMIT_S:.0f} s") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
