"""Checkouts with accepted values."""

import subprocess

from worlds import entry

from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.store.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "", "suites/test_a.py::test_a", "rate")


def git(folder, *words):
    argv = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def state_of(checkout):
    """What must not change: files, index and branch."""
    return git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")


def accept(project, value, key=KEY):
    book = BaselineBook(project / "baselines", project / "state")
    book.put(key, entry(value))
    book.save()
