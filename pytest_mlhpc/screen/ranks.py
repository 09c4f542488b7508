"""Which processes are the program's ranks, and which their helpers. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.screen.courses import Course, Key
from pytest_mlhpc.screen.told import Told

#: Programs that start others and do no work of their own, by the name that the kernel has of them (15 letters).
LAUNCHERS = frozenset(
    (
        "sh", "bash", "dash", "zsh", "ksh", "env", "nice", "numactl", "taskset", "time", "timeout", "tini", "dumb-init", "sudo",
        "su", "srun", "poprun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy",
        "slurmstepd", "slurm_script", "torchrun", "starter-suid", "apptainer", "singularity",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """One rank's process, what it told, and its helpers: loader processes and whatever else it started."""

    number: int
    host: str
    own: Course | None
    helpers: tuple[Course, ...] = ()
    told: Told | None = None

    @property
    def cores(self) -> float:
        """Cores that the rank's own process kept busy."""
        return 0.0 if self.own is None else self.own.cores


def find_ranks(found: dict[Key, Course], told: Sequence[Told]) -> tuple[Rank, ...]:
    """Return the ranks, in order.

    They are the processes that told of steps, else those with a rank in their environment, else the highest process of the tree
    that is no launcher.
    """
    courses = list(found.values())
    mains: list[tuple[Course | None, Told | None]] = [
        (next((own for own in courses if (own.host, own.pid) == (one.host, one.pid)), None), one)
        for one in told
        if one.ends
    ]
    mains = mains or [(own, None) for own in _ranked(courses)] or [(own, None) for own in _highest(courses)]
    taken = {own.pid for own, _ in mains if own is not None}
    made = []
    for place, (own, one) in enumerate(mains):
        number = (
            one.rank if one is not None and one.rank is not None else own.rank if own is not None else None
        )
        host = own.host if own is not None else one.host if one is not None else ""
        helpers = () if own is None else tuple(_below(own, courses, taken))
        made.append(Rank(place if number is None else number, host, own, helpers, one))
    return tuple(sorted(made, key=lambda rank: (rank.number, rank.host)))


def _ranked(courses: Sequence[Course]) -> list[Course]:
    """Return one process for each rank: the highest with that rank, shells and launchers left aside.

    Of several trees with one rank (a batch script has that of its first task) the one that works most has it.
    """
    by_pid = {(one.host, one.pid): one for one in courses}
    best: dict[int, tuple[float, Course]] = {}
    for one in courses:
        above = by_pid.get((one.host, one.parent))
        if one.rank is None or (above is not None and above.rank == one.rank):
            continue
        work = one.cores + sum(other.cores for other in _below(one, courses, set()))
        if one.rank not in best or work > best[one.rank][0]:
            best[one.rank] = (work, one)
    return [_working(one, courses) for _, one in best.values()]


def _highest(courses: Sequence[Course]) -> list[Course]:
    """Return the highest process that is no launcher; of several the one that works most."""
    pids = {(one.host, one.pid) for one in courses}
    tops = [_working(one, courses) for one in courses if (one.host, one.parent) not in pids]
    return [max(tops, key=lambda one: one.cores)] if tops else []


def _working(top: Course, courses: Sequence[Course]) -> Course:
    """Return the process that a launcher started, itself if it is none."""
    while top.name in LAUNCHERS:
        children = [one for one in courses if one.host == top.host and one.parent == top.pid]
        if not children:
            break
        top = max(children, key=lambda one: (one.name not in LAUNCHERS, one.cores))
    return top


def _below(own: Course, courses: Sequence[Course], taken: set[int]) -> list[Course]:
    found: list[Course] = []
    todo = {own.pid}
    while todo:
        level = [
            one for one in courses if one.host == own.host and one.parent in todo and one.pid not in taken
        ]
        level = [one for one in level if one not in found and one.pid != own.pid]
        found += level
        todo = {one.pid for one in level}
    return found
