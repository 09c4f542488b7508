"""One made-up node's process: the vetting of every node, with the child of :mod:`benchmarks.vet_child` in the place of its own.

With torch's child the checks are the real ones of this machine; with the small one they are the tests' scripted ones.
"""

from __future__ import annotations

import os
import sys

from benchmarks.vet_child import KIND
from pytest_mlhpc.node.vet.main import leave, main
from pytest_mlhpc.node.vet.workers import WorkerModules

if __name__ == "__main__":
    checks = WorkerModules().passive if os.environ.get(KIND) == "torch" else "scripted_passive"
    leave(main(sys.argv[1:], WorkerModules(checks, "benchmarks.vet_child")))
