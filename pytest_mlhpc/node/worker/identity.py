"""PAYLOAD. Which rank this process is, where the launcher tells it in names of its own."""

from __future__ import annotations

from typing import Mapping, MutableMapping, Tuple

#: Value of ``MLHPC_RANKS_FROM`` -> variables for RANK, LOCAL_RANK and WORLD_SIZE (srun(1), "OUTPUT ENVIRONMENT VARIABLES";
#: OpenMPI's mpirun(1)).
SOURCES: Mapping[str, Tuple[str, str, str]] = {
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def adopt(environ: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE from what the launcher named in ``MLHPC_RANKS_FROM`` has set; never guess.

    Without that variable nothing is changed: torchrun, or a single rank.

    Raises:
        ValueError: the launcher did not set what it was to set.
    """
    source = environ.get("MLHPC_RANKS_FROM", "")
    if not source:
        return
    if source not in SOURCES:
        raise ValueError(f"MLHPC_RANKS_FROM={source!r} is none of {', '.join(SOURCES)}")
    for wanted, name in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), SOURCES[source]):
        text = environ.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} is no number: this process was not started by {source}")
        environ[wanted] = text
