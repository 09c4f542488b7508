"""`mlhpc report html` killed between two lines, or on a full disk: the old page or the new one, never half of one."""

import os
import resource
import signal
import time

import pytest
from nights_of import DAY, store
from page_content import content_of
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.cli import report as html_cli

#: What a page is written with, in this order; the page itself goes out by `write`, which is killed in its middle.
CALLS = ("open", "write", "fchmod", "fsync", "replace")


def record_nights(state_dir, numbers):
    now = time.time_ns()
    figures = measurement(100.0)
    made = [record(n + 1, created_ns=now - (40 - n) * DAY, measurement=figures) for n in numbers]
    store(state_dir, made, f"s{numbers[0]}")


@pytest.fixture
def page(state_dir, tmp_path, monkeypatch, mlhpc):
    """A page of six nights, of which two more are recorded since."""
    monkeypatch.chdir(tmp_path)
    record_nights(state_dir, range(6))
    mlhpc("report", "html", "--output", "out.html")
    record_nights(state_dir, range(6, 8))
    return tmp_path / "out.html"


def nights(page):
    (bench,) = content_of(page.read_text())["benches"]
    return len(bench["kind"])


def temporary(page):
    return sorted(page.parent.glob(".out.html.*"))


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def report_and_die(call, when):
    """Write the page; be killed at the first of these calls that writing it makes."""
    real = html_cli.replace_file

    def armed(path, text):
        if call == "write":  # the kernel ends whoever writes beyond this
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            limit(len(text) // 2)
            real(path, text)
        step = getattr(os, call)

        def deadly(*arguments, **named):
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            step(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, call, deadly)
        real(path, text)

    html_cli.replace_file = armed
    try:
        main(["report", "html", "--output", "out.html"])
    finally:
        os._exit(0)


STEPS = [(call, when) for call in CALLS for when in ("before", "after") if (call, when) != ("write", "after")]


@pytest.mark.parametrize(("call", "when"), STEPS)
def test_killed_at_any_step_it_leaves_the_old_page_or_the_new_one(page, call, when):
    old = page.read_bytes()
    pid = os.fork()
    if pid == 0:
        report_and_die(call, when)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    replaced = (call, when) == ("replace", "after")
    assert nights(page) == 8 if replaced else page.read_bytes() == old
    assert len(temporary(page)) == (0 if replaced or (call, when) == ("open", "before") else 1)
    assert main(["report", "html", "--output", "out.html"]) == 0
    assert nights(page) == 8


def test_a_full_disk_is_named_and_leaves_the_old_page_and_nothing_else(page, monkeypatch, mlhpc):
    old = page.read_bytes()
    real = html_cli.replace_file
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]

    def on_a_full_disk(path, text):
        limit(len(text) // 2)
        try:
            real(path, text)
        finally:
            limit(most)

    monkeypatch.setattr(html_cli, "replace_file", on_a_full_disk)
    err = mlhpc("report", "html", "--output", "out.html", code=4).err
    assert "out.html: cannot be written: File too large" in err
    assert page.read_bytes() == old
    assert temporary(page) == []
