"""How long a cause that may heal by itself is waited for. Pure; times are of a monotonic clock, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_mlhpc.provision.kubernetes.causes import Cause


@dataclass
class Patience:
    """Since when each cause of one allocation is there.

    Args:
        limits: name of a patience -> seconds. A name that is not there is waited for as ``unknown``.
    """

    limits: Mapping[str, float]
    _since: dict[str, float] = field(default_factory=dict)
    _latest: dict[str, Cause] = field(default_factory=dict)

    def note(self, causes: Mapping[str, Cause], now: float) -> None:
        """Say what is wrong at *now*: object's name -> cause; what is gone has healed, and gets all its time again.

        An image that fails is now ErrImagePull, now ImagePullBackOff: the clock goes on as long as the outcome is the same.
        """
        seen = {f"{name} {cause.outcome}": cause for name, cause in causes.items()}
        self._since = {key: self._since.get(key, now) for key in seen}
        self._latest = seen

    def overdue(self, now: float) -> Cause | None:
        """Return the cause that will not be waited for any longer, the one that is longest overdue first."""
        late = [
            (self._limit(cause) - (now - self._since[key]), key)
            for key, cause in self._latest.items()
            if now - self._since[key] >= self._limit(cause)
        ]
        return self._latest[min(late)[1]] if late else None

    def next_look(self) -> float | None:
        """Return when a cause becomes overdue, None if nothing is wrong."""
        return min(
            (self._since[key] + self._limit(cause) for key, cause in self._latest.items()), default=None
        )

    def waited(self, cause: Cause, now: float) -> float:
        """Return how long *cause* has been there, in seconds."""
        since = [self._since[key] for key, one in self._latest.items() if one == cause]
        return now - min(since, default=now)

    def _limit(self, cause: Cause) -> float:
        if not cause.patience:
            return 0.0
        return self.limits.get(cause.patience, self.limits.get("unknown", 0.0))
