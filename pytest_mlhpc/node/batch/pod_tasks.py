"""PAYLOAD. The processes of one run that one pod starts, by its agent or by ``podrun``."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.pod_memory import Watch
from pytest_mlhpc.node.processes import describe_exit


@dataclass(frozen=True)
class Share:
    """What one pod does of a run: ``per_pod`` processes with ``argv``. ``ranks``: they are told their ranks."""

    run_id: str
    pod: int
    pods: int
    per_pod: int
    ranks: bool
    argv: Tuple[str, ...]
    keep_going: bool = False  #: one that ends badly ends no other

    def variables(self, local: int) -> Dict[str, str]:
        """Return what tells a process its place; torchrun's agents tell their ranks themselves."""
        found = {"MLHPC_TASK_POD": str(self.pod)}
        if self.ranks:
            rank, world = self.pod * self.per_pod + local, self.pods * self.per_pod
            found.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world))
        return found


@dataclass(frozen=True)
class Exit:
    """How the process number *task* of all pods ended: code or minus signal; whether for its container's memory."""

    task: int
    code: int
    memory: bool = False

    def __str__(self) -> str:
        return describe_exit(self.code)


class Tasks:
    """Starts the processes of *share* at once. ``error`` is why one could not be started."""

    def __init__(
        self, share: Share, environment: Mapping[str, str], cwd: str, output: Optional[int] = None
    ) -> None:
        self.error = ""
        self.share = share
        self._memory = Watch()
        self._running: Dict[int, int] = {}  #: pid -> task
        self._processes: List[subprocess.Popen[bytes]] = []
        for local in range(share.per_pod):
            try:
                process = subprocess.Popen(
                    list(share.argv),
                    env={**environment, **share.variables(local)},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                bad = getattr(error, "filename", None) == cwd
                self.error = f"cannot start {share.argv[0]!r}{f' in {cwd!r}' if bad else ''}: {why}"
                return
            self._processes.append(process)
            self._running[process.pid] = share.pod * share.per_pod + local

    @property
    def running(self) -> bool:
        """Whether one of them has not ended."""
        return bool(self._running)

    def note(self, ended: Mapping[int, int]) -> Iterable[Exit]:
        """Take exit codes by pid, and return those of ours."""
        for process in self._processes:
            if process.pid in ended and process.pid in self._running:
                code = process.returncode = ended[process.pid]  # reaped here, not by Popen
                memory = code == -9 and self._memory.grown()
                yield Exit(self._running.pop(process.pid), code, memory)
