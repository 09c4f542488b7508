"""Install the package into a virtual environment over what the base image has: ``install.py SOURCE TARGET``, in the Dockerfile.

A torch of the base is never replaced: images of vendors bring builds that no index has. TORCH_VERSION, TORCH_INDEX and EXTRAS
are the arguments of the Dockerfile.
"""

# ruff: noqa: INP001 - a program of the image's, no part of a package

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

#: As in pyproject.toml: requires-python.
OLDEST = (3, 11)
#: What is built for one torch, or torch for it (NumPy's ABI): it stays as the base has it.
_BELONGS_TO_TORCH = re.compile(r"(torch|pytorch-triton|triton|nvidia-|numpy$)")
#: A folder of wheels, and a configuration of pip, both mounted while this runs; either may be missing.
_WHEELS, _PIP = Path("/wheels"), Path("/run/secrets/pip")


def main() -> None:
    """Make the environment, or end with a sentence."""
    source, target = map(Path, sys.argv[1:])
    if sys.version_info < OLDEST:
        sys.exit(
            f"BASE has Python {sys.version_info[0]}.{sys.version_info[1]}, this package needs {OLDEST[0]}.{OLDEST[1]}. Pods need "
            "none of this package: run the base itself, with its Python (3.9 or newer) and its torch"
        )
    kept = of_base()
    python = make_environment(target)
    pinned = (source / "constraints.txt").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        wanted = versions(pinned, kept, os.environ.get("TORCH_VERSION", ""))
        constraints.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--constraint", str(constraints)]
        if any(_WHEELS.glob("*.whl")):
            pip += ["--no-index", "--find-links", str(_WHEELS)]
        index = os.environ.get("TORCH_INDEX", "")
        if index and "torch" not in kept:
            call([*pip, "--index-url", index, "torch"])
        extras = os.environ.get("EXTRAS", "")
        call([*pip, f"{source}[{extras}]" if extras else str(source)])
    if list(target.glob("lib/python*/site-packages/pip")):
        call([str(python), "-m", "pip", "uninstall", "--yes", "pip"])  # it served
    if "torch" in kept and list(target.glob("lib/python*/site-packages/torch")):
        sys.exit(
            f"pip has put another torch over that of BASE ({kept['torch']}): this is a fault of install.py"
        )


def of_base() -> dict[str, str]:
    """Return the versions of what stays as the base has it, by normalised name; nothing without a torch."""
    found = {
        normal(dist.metadata["Name"]): dist.version
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }
    if "torch" not in found:
        return {}
    return {name: version for name, version in found.items() if _BELONGS_TO_TORCH.match(name)}


def versions(pinned: list[str], kept: dict[str, str], torch: str) -> list[str]:
    """Return the lines of constraints.txt, with the base's versions in place of its own.

    Args:
        pinned: Lines like ``name==version``, and comments.
        kept: Of the base, see ``of_base``.
        torch: A version of torch in place of the pinned one, where the base has none; or "".
    """
    instead = kept or ({"torch": torch} if torch else {})
    rest = [line for line in pinned if normal(line.partition("==")[0]) not in instead]
    return rest + [f"{name}=={version}" for name, version in sorted(instead.items())]


def normal(name: str) -> str:
    """Return a project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def make_environment(target: Path) -> Path:
    """Make an environment that sees what the base has, and has a pip; return its Python."""
    call([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(target)])
    python = target / "bin/python"
    if sys.prefix != sys.base_prefix:  # the base's torch lies in an environment, which ours would look past
        (packages,) = target.glob("lib/python*/site-packages")
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (packages / "base.pth").write_text("\n".join(sorted(paths)) + "\n", encoding="utf-8")
    if subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        call([str(python), "-m", "ensurepip"])
    return python


def call(argv: list[str]) -> None:
    """Run a command whose output is the build's; end the build if it fails."""
    environment = {**os.environ, **({"PIP_CONFIG_FILE": str(_PIP)} if _PIP.exists() else {})}
    code = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        sys.exit(f"`{' '.join(argv)}` ended with {code}")


if __name__ == "__main__":
    main()
