"""Sends what waits in the book's outbox: each message to each channel once, in order, whatever dies in between.

The intent to send is the entry in the outbox, which was written with the new state. After each success the entry is written
without that channel. Who is killed between the two sends the same message again, under the same id, by which webhooks,
Alertmanager, issues and mail programs know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.alert.channels.base import Channel, ChannelError, Message
from pytest_mlhpc.alert.model import DAY_NS, Book, Pending

#: A message that could not be sent for so long helps nobody any more.
KEPT_NS = 30 * DAY_NS


@dataclass(frozen=True)
class Delivery:
    """What became of one message on one channel; ``error`` is empty when it was delivered, else it begins with the channel."""

    message: Message
    channel: str
    error: str = ""
    retry: bool = False


def queued(book: Book, messages: Sequence[Message], takers: Callable[[Message], Sequence[str]]) -> Book:
    """Return the book with *messages* waiting for the channels that take them; what nobody takes is not kept."""
    new = [Pending(message, tuple(names)) for message in messages if (names := takers(message))]
    return replace(book, outbox=(*book.outbox, *new))


def deliver(
    book: Book,
    channels: Mapping[str, Channel],
    save: Callable[[Book], None],
    tell: Callable[[Delivery], None],
    now_ns: int,
) -> Book:
    """Send what waits, oldest first; *save* is called after each success. Return the book without it.

    A channel that fails for now gets nothing more until the next time, as its messages make sense only in order. What it
    refuses for good, or cannot be given for 30 days, is told and dropped, as is what waits for a channel that is configured no more.

    Raises:
        StoreError: by *save*; what was sent is then sent once more next time.
    """
    down: set[str] = set()
    for pending in book.outbox:
        for name in pending.waiting:
            if name in down:
                continue
            delivery = _send(pending.message, name, channels.get(name))
            if delivery.retry and pending.message.created_ns < now_ns - KEPT_NS:
                delivery = replace(delivery, retry=False, error=f"{delivery.error}; given up")
            tell(delivery)
            if delivery.retry:
                down.add(name)
                continue
            book = _without(book, pending.message.id, name)
            save(book)
    return book


def _send(message: Message, name: str, channel: Channel | None) -> Delivery:
    if channel is None:
        return Delivery(message, name, f"{name}: there is no such channel any more; dropped")
    try:
        channel.send(message)
    except ChannelError as error:
        return Delivery(message, name, _named(name, error), retry=error.retry)
    except Exception as error:  # noqa: BLE001 - a third party's channel may raise anything; others shall get theirs
        return Delivery(message, name, _defect(name, error), retry=True)
    return Delivery(message, name)


def repeat(channels: Mapping[str, Channel], messages: Callable[[str], Sequence[Message]]) -> list[str]:
    """Tell again of all open incidents where the peer forgets; return what went wrong, in words."""
    problems = []
    for name, channel in channels.items():
        try:
            channel.resend_open(messages(name))
        except ChannelError as error:
            problems.append(_named(name, error))
        except Exception as error:  # noqa: BLE001 - as above
            problems.append(_defect(name, error))
    return problems


def _named(name: str, error: ChannelError) -> str:
    """Return an error's text with the channel's name before it, once: ours begin with it, a third party's may not."""
    text = str(error)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"


def _defect(name: str, error: Exception) -> str:
    """Name an error that no channel should raise; its text is not shown, as it may hold a secret."""
    return f"{name}: a defect of the channel: {type(error).__name__}"


def _without(book: Book, message_id: str, name: str) -> Book:
    """Return the book without one channel of one message."""
    kept = []
    for pending in book.outbox:
        waiting = tuple(
            other for other in pending.waiting if pending.message.id != message_id or other != name
        )
        if waiting:
            kept.append(replace(pending, waiting=waiting))
    return replace(book, outbox=tuple(kept))
