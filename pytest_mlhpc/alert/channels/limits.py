"""A time limit around one exchange with a peer, whatever the peer does: refuse, hang, or dribble a byte a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pytest_mlhpc.alert.line import Line

T = TypeVar("T")
#: How long an exchange whose connection was cut may take to notice, in seconds.
_NOTICE_S = 2.0


def within(limit_s: float, work: Callable[[Line], T]) -> T:
    """Return what *work* returns, if it does so in time.

    A socket's own time limit knows only of silence, and none reaches the resolver of names: hence a thread, left behind as a
    daemon in the worst case, when the resolver hangs.

    Args:
        limit_s: Of the whole exchange, in seconds.
        work: Does it, and gives its connection to the line it receives.

    Raises:
        TimeoutError: It was not done in time.
        BaseException: What *work* raised.
    """
    line = Line()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work(line))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            failed.append(error)
        finally:
            line.release()

    thread = threading.Thread(target=run, name="mlhpc-alert", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        line.cut("its time is over")
        thread.join(_NOTICE_S)
        raise TimeoutError  # also if it returned something now: what is cut off may look whole
    if failed:
        raise failed[0]
    return done[0]
