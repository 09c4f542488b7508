"""A thread copies the environment while pytest sets and removes a variable in its own."""

import os
import threading
from collections.abc import Mapping

from pytest_mlhpc.node.processes import copy_of


def test_a_variable_that_comes_and_goes_breaks_no_copy(monkeypatch):
    monkeypatch.setenv("MLHPC_STAYS", "1")
    over = threading.Event()

    def change():
        while not over.is_set():
            os.environ["MLHPC_COMES"] = "and"
            del os.environ["MLHPC_COMES"]

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert all(copy_of(os.environ)["MLHPC_STAYS"] == "1" for _ in range(20_000))
    finally:
        over.set()
        changing.join()


class Changing(Mapping[str, str]):
    """Variables of which one is gone when its value is asked for the first time."""

    asked = 0

    def __iter__(self):
        return iter(["HOME"])

    def __len__(self):
        return 1

    def __getitem__(self, name):
        self.asked += 1
        if self.asked == 1:
            raise KeyError(name)
        return "/root"


def test_what_is_gone_between_its_name_and_its_value_is_copied_again():
    environ = Changing()
    assert copy_of(environ) == {"HOME": "/root"}
    assert environ.asked == 2
