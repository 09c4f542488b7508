"""What of this machine pods mount, read-only, to run the project with the Python that runs it here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from testcluster import box
from testcluster.errors import ClusterError


def variables() -> dict[str, str]:
    """Return what the system `testkubernetes` interpolates: the interpreter, and the two folders that it needs besides /usr.

    Both are always different from each other and from /usr, as mounts of a pod must be.
    """
    python = box.interpreter()
    prefix, base = _prefixes(python)
    spare = [Path("/usr/lib"), Path("/usr/share")]  # mounted already, with /usr: it does no harm
    venv = prefix if prefix not in {base, Path("/usr")} else spare.pop()
    if base == Path("/usr"):
        base = spare.pop()
    return {"MLHPC_TEST_PYTHON": str(python), "MLHPC_TEST_VENV": str(venv), "MLHPC_TEST_PREFIX": str(base)}


def _prefixes(python: Path) -> tuple[Path, Path]:
    ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", ask],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        prefix, base = map(Path, json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ClusterError(f"{python} does not run: {error}") from error
    return prefix, base
