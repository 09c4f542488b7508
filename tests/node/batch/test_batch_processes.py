"""Processes that end with their parent, whenever it dies."""

import subprocess
import sys

import pytest
from polling import LIMIT_S

ORPHAN = """
import os, sys, time
from pytest_mlhpc.node.processes import die_with_parent
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)
die_with_parent(parent)
print("lives on", flush=True)
"""

CHILD = """
import os, sys, time
from pytest_mlhpc.node.processes import die_with_parent
ready, asked = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    os.write(asked, b"1")
    time.sleep(600)
os.read(ready, 1)
os.kill(parent, 9)
"""


@pytest.mark.parametrize(
    "code", [ORPHAN, CHILD], ids=["before it asks the kernel", "after it asked the kernel"]
)
def test_a_process_ends_with_its_parent_that_dies(code):
    # Its output ends when the last process that holds it has gone.
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert ended.stdout == ""
    assert ended.stderr == ""


def test_a_signal_of_choice_reaches_a_process_whose_parent_has_died():
    code = ORPHAN.replace("die_with_parent(parent)", "die_with_parent(parent, 12)").replace(
        "while",
        "import signal\nsignal.signal(12, lambda *_: (print('ended', flush=True), os._exit(0)))\nwhile",
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert ended.stdout == "ended\n"
