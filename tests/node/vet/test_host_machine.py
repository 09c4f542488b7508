"""What is read of this very machine, by the real kernel and real files."""

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import LOG_BYTES, Absent, Context, Machine, Unreadable, from_kmsg, records
from pytest_mlhpc.node.vet.policy import built_in

#: Checks of the host that need neither rights nor time.
HOST = {"inventory", "pci", "edac", "cpu_throttle", "network"}


def test_the_kernel_log_of_this_machine_is_read_or_said_to_be_closed() -> None:
    machine = Machine()
    try:
        log = machine.kernel_log()
    except Unreadable as error:
        assert all(word in str(error) for word in ("kmsg", "journalctl"))  # noqa: PT017 - either is right
    else:
        assert log.messages
        assert all(message.at is None or message.at <= machine.clock() for message in log.messages)


def test_checks_of_the_host_say_nothing_bad_of_what_an_ordinary_machine_does_not_have() -> None:
    machine, context = Machine(), Context(built_in(), host="n1", hosts=("n1",))
    checks, watches = ([one for one in every if one.name in HOST] for every in all_checks())
    said = [check.examine(machine, context) for check in checks]
    said += [
        watch.end(machine, context, watch.sample(machine, watch.start(machine, context))) for watch in watches
    ]
    bad = {Severity.CRITICAL, Severity.UNKNOWN}
    assert not [one for outcome in said for one in outcome.findings if one.severity in bad]


def test_the_clock_of_this_machine_can_be_asked() -> None:
    try:
        assert 0 <= Machine().clock_state().error_s < 3600
    except Unreadable as error:
        assert error.code  # noqa: PT017 - a kernel may refuse, and then says why


def test_a_log_that_is_being_overwritten_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kmsg").touch()
    answers = [b"6,1,1,-;one\n", OSError(errno.EPIPE, "overwritten"), b"6,9,2,-;two\n", BlockingIOError()]
    monkeypatch.setattr(os, "read", Mock(side_effect=answers))
    assert records(str(tmp_path / "kmsg")) == b"6,1,1,-;one\n6,9,2,-;two\n"


def test_of_an_endless_log_the_last_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes((b"6,1,1,-;old" + b"." * 4000 + b"\n") * (2 * LOG_BYTES // 4000) + b"6,2,2,-;new\n")
    data = records(str(path))
    assert len(data) <= LOG_BYTES
    assert data.endswith(b"6,2,2,-;new\n")
    assert from_kmsg(data, 10.0, 5.0)[-1].text == "new"


def test_a_log_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert records(str(path)) == b""


def test_what_is_not_there_is_distinguished_from_what_may_not_be_read(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    for read in (machine.text, machine.names_in):
        with pytest.raises(Absent, match="/nowhere is not there"):
            read("/nowhere")
    with pytest.raises(Unreadable, match="/ cannot be read: Is a directory") as caught:
        machine.text("/")
    assert (type(caught.value), caught.value.code) == (Unreadable, errno.EISDIR)


def test_a_device_is_asked_for_no_more_of_its_configuration_than_its_name(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(bytes(range(64)))
    assert Machine(root=tmp_path).head("/config", 4) == b"\x00\x01\x02\x03"


def test_the_age_of_the_kernel_is_that_which_its_log_counts() -> None:
    assert 0 < Machine().up_s() <= time.clock_gettime(time.CLOCK_MONOTONIC)
