"""AMD GPUs: torch's HIP build calls them ``cuda`` and its RCCL ``nccl``; MIOpen's databases, energy by amdsmi.

MIOpen searches the fastest kernel of each convolution when it first runs it and stores what it found in a database, in the
home directory by default, which compute nodes may not have. Here it lies on the node, under one name for all
runs of one user and torch, so that warm-up fills it once (MIOpen documentation, "Find modes", "Setting up locations").
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Mapping, MutableMapping, Optional

import torch

from pytest_mlhpc.node.worker import energy
from pytest_mlhpc.node.worker.accelerators.streams import Capturing, ordinal_for
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: Where MIOpen keeps what it found, and the kernels that it built.
DATABASES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")


class Rocm(Capturing):
    """One GPU (on MI250X: one die) of one rank; a step of it can be captured."""

    type = "rocm"
    backend = "nccl"  # RCCL has NCCL's names

    def __init__(self, ordinal: int) -> None:
        super().__init__(torch.cuda, torch.device("cuda", ordinal))
        self._properties: Any = torch.cuda.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self._counter = energy.AmdCounter(pci_address(self._properties))
        found = self._counter.index()
        self.index = ordinal if found is None else found

    def energy_j(self) -> Optional[float]:
        """Return the board's energy counter, see :mod:`pytest_mlhpc.node.worker.energy`."""
        return self._counter.joules()

    def environment(self) -> Mapping[str, str]:
        """Return HIP, MIOpen and RCCL versions, and which GPU this is."""
        cudnn: Any = torch.backends.cudnn  # tells MIOpen's version in HIP builds
        found = {
            "hip": str(torch.version.hip),
            "miopen": str(cudnn.version() or ""),
            "gcn_architecture": str(getattr(self._properties, "gcnArchName", "")),
            "miopen_database": os.environ.get(DATABASES[0], ""),
        }
        return {name: value for name, value in found.items() if value}


def pci_address(properties: Any) -> Optional[str]:
    """Return ``domain:bus:device.0`` in Linux's spelling, or None where torch does not tell (before 2.5)."""
    bus = getattr(properties, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


def prepare_miopen(
    environ: MutableMapping[str, str], find: Optional[str], torch_version: str, root: Optional[Path] = None
) -> None:
    """Tell MIOpen how to look for kernels, and where on this node to keep what it finds.

    Variables that the environment has already stay, but for the find mode if the test names one. *root* is the folder
    of temporary files ($TMPDIR).
    """
    if find is not None:
        environ["MIOPEN_FIND_MODE"] = find.upper()
    missing = [name for name in DATABASES if not environ.get(name)]
    if missing:
        folder = _own_folder(root or Path(tempfile.gettempdir()), torch_version)
        for name in missing:
            environ[name] = folder


def _own_folder(root: Path, torch_version: str) -> str:
    """Return a folder that is this user's alone: always the same one, unless somebody else has made it."""
    folder = root / f"mlhpc-miopen-{os.getuid()}-{re.sub(r'[^A-Za-z0-9.]', '-', torch_version)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return tempfile.mkdtemp(prefix="mlhpc-miopen-")
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return str(folder) if mine else tempfile.mkdtemp(prefix="mlhpc-miopen-", dir=root)


def open_device(local_rank: int) -> Rocm:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an AMD GPU here.
    """
    if getattr(torch.version, "hip", None) is None:
        text = (
            f"torch {torch.__version__} of this environment is built without ROCm; it cannot use an AMD GPU"
        )
        raise WorkerFailure("wrong_device", text)
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        visible = {name: os.environ.get(name) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
        text = (
            f"torch {torch.__version__} finds no AMD GPU ({visible}); check driver, /dev/kfd and allocation"
        )
        raise WorkerFailure("wrong_device", text)
    return Rocm(ordinal_for(local_rank, torch.cuda.device_count()))
