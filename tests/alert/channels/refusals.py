"""Errors of channels, as values."""

import pytest

from pytest_mlhpc.alert.channels.base import DeliveryError


def refusal(send, *arguments, match, **more):
    """Call what a channel cannot do, and return its error, whose text matches."""
    with pytest.raises(DeliveryError, match=match) as caught:
        send(*arguments, **more)
    return caught.value
