"""`python send_and_die.py STATE ALERTS.YAML [die]`: queue one message (if none waits yet) and send it as `mlhpc alert send` does.

With `die` the process is killed after the first success of a channel, before the book says so.
"""

import os
import signal
import sys
import time
from pathlib import Path

from alert_messages import message

from pytest_mlhpc.alert.book import Delivery, book_path, deliver, queued, read_book, write_book
from pytest_mlhpc.alert.config import load
from pytest_mlhpc.alert.model import Book
from pytest_mlhpc.builtin import channel_types


def main(state: Path, config_path: Path, die: bool) -> int:
    config = load(config_path, os.environ, channel_types())
    if not book_path(state).exists():
        book_path(state).parent.mkdir(parents=True)
        now = time.time_ns()
        new = message(started_ns=now, created_ns=now)
        write_book(state, queued(Book(), [new], lambda _message: list(config.channels)))
    book = read_book(state, sys.exit)

    def save(after: Book) -> None:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        write_book(state, after)

    failed: list[Delivery] = []
    book = deliver(
        book, config.channels, save, lambda one: failed.append(one) if one.error else None, time.time_ns()
    )
    for one in failed:
        sys.stderr.write(f"{one.error}\n")
    return len(book.outbox) + len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["die"]))
