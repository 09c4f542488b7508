"""Allocations that are being deleted: asked for as often as it takes, then waited for until the cluster has nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pytest_mlhpc.provision.base import Event
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.clusters import Clusters
from pytest_mlhpc.provision.kubernetes.ending import PAUSE_S, delete
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.intake import WAKE, Intake

#: How long pods are waited for: a kubelet takes some ten seconds beyond the grace. As long, a server that does not answer
#: is asked to delete them.
GONE_LIMIT_S: Final = 60.0


class Leaving:
    """What the cluster still has to delete.

    Args:
        allocations: by id; shared with the intake.
        wait: returns the next report within so many seconds, or None.
    """

    def __init__(
        self,
        allocations: dict[str, Allocation],
        clusters: Clusters,
        intake: Intake,
        now: Callable[[], float],
        wait: Callable[[float], object | None],
    ) -> None:
        self._allocations = allocations
        self._clusters = clusters
        self._intake = intake
        self._now = now
        self._wait = wait

    def add(self, allocation: Allocation) -> None:
        """Wait from now on for what the cluster was asked to delete."""
        self._allocations[allocation.handle.id] = allocation

    def look(self) -> None:
        """Forget what is gone."""
        for allocation in [one for one in self._allocations.values() if one.all_gone]:
            self.forget(allocation)

    def forget(self, allocation: Allocation) -> None:
        """Give back what an allocation holds here."""
        allocation.stop_following()
        self._allocations.pop(allocation.handle.id, None)
        self._intake.forget(allocation)

    def find_all(self, allocation: Allocation) -> None:
        """Ask the server what there is of *allocation*: also what it never said that it has made.

        Raises:
            KubernetesError: it does not tell.
        """
        found = self._clusters.objects_of(allocation)
        allocation.note(found)
        for ref in found:
            if ref.resource == allocation.kind.resource:
                allocation.workloads[ref.name] = ref
                allocation.gone_workloads.discard(ref.name)
        self._intake.claim(allocation)

    def undo(self, allocation: Allocation) -> KubernetesError | None:
        """Delete whatever there may be of *allocation*; return why the server has not taken that."""
        allocation.phase = Phase.ENDING
        try:
            self.find_all(allocation)
            delete(allocation, grace_s=round(allocation.settings.grace_s))
        except KubernetesError as error:
            return error
        return None

    def end(self, allocations: Iterable[Allocation], found: list[Event]) -> list[Allocation]:
        """Delete *allocations* and wait until they are gone; return those of which that is not sure.

        *found* gets events of others.
        """
        todo = list(allocations)
        asked: list[Allocation] = []
        unsure: list[Allocation] = []
        deadline = self._now() + GONE_LIMIT_S
        while todo:
            silent: set[str] = set()
            later = []
            for one in todo:
                # One server is asked once in a round: none of its calls would be answered sooner than the first.
                error = None if one.api.server in silent else self.undo(one)
                if one.api.server in silent or isinstance(error, Unavailable):
                    silent.add(one.api.server)
                    later.append(one)
                else:
                    (asked if error is None else unsure).append(one)
            todo = later
            if todo and self._now() >= deadline:
                break
            if todo:
                self._hear(min(self._now() + PAUSE_S, deadline), lambda: False, found)
        in_doubt = [
            one for one in asked if one.tries
        ]  # it may be created yet, by a request without an answer
        left = self.await_gone([one for one in asked if one not in in_doubt], deadline, found)
        for one in (*todo, *unsure, *in_doubt, *left):
            self.forget(one)
        return [*todo, *unsure, *in_doubt, *left]

    def await_gone(
        self, allocations: list[Allocation], deadline: float, found: list[Event]
    ) -> list[Allocation]:
        """Wait until no pod of *allocations* is left; return those that have some at *deadline*."""
        self._hear(deadline, lambda: all(one.all_gone for one in allocations), found)
        self.look()
        return [one for one in allocations if not one.all_gone]

    def close(self, found: list[Event]) -> None:
        """Wait a while for the rest, where the server answers; then forget it."""
        heard = [one for one in self._allocations.values() if self._intake.silence(one) is None]
        self.await_gone(heard, self._now() + GONE_LIMIT_S, found)
        for allocation in list(self._allocations.values()):
            self.forget(allocation)

    def _hear(self, until: float, enough: Callable[[], bool], found: list[Event]) -> None:
        """Take in what comes until then, or until it is *enough*."""
        while not enough() and (remaining := until - self._now()) > 0:
            report = self._wait(remaining)
            if report is not None and report is not WAKE:
                found += self._intake.take(report)
