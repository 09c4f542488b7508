"""PAYLOAD, standard library only. Single observations behind a figure: their quantiles, and fewer of them."""

from __future__ import annotations

from typing import Sequence, Tuple

#: Most samples that a metric carries (node/protocol/schema.py).
MOST_SAMPLES = 4096


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which *share* of *values* lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    # Weights instead of a difference: the result never leaves the two neighbours, whatever rounding does.
    weight = place - below
    return min(max(ordered[below] * (1.0 - weight) + ordered[above] * weight, ordered[below]), ordered[above])


def thin(values: Sequence[float], most: int = MOST_SAMPLES) -> Tuple[float, ...]:
    """Return at most *most* of *values* in their order, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return tuple(values)
    last = len(values) - 1
    return tuple(values[place * last // (most - 1)] for place in range(most))
