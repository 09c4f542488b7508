"""How long to leave a server alone that does not answer, or says no."""

from __future__ import annotations

import random

from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, Unavailable

#: The first pause, doubled each time, and the longest, in seconds; client-go's reflector waits 0.8 to 30.
FIRST_S, MOST_S = 1.0, 30.0
#: After a refusal, which only people can change, in seconds.
REFUSED_S = 60.0


def pause_after(failures: int, error: KubernetesError) -> float:
    """Return the pause after so many failures in a row (at least one), in seconds, never shorter than the server asked for.

    A part of it is random, so that not all who lost one server come back to it in the same moment.
    """
    if not isinstance(error, Unavailable) and error.status not in {0, 410}:
        pause = REFUSED_S
    else:
        pause = min(FIRST_S * 2.0 ** min(failures - 1, 10), MOST_S)
    asked = error.retry_after_s if isinstance(error, Unavailable) else 0.0
    return max(pause, asked) * random.uniform(1.0, 1.25)  # noqa: S311 - spreads load, guards nothing
