"""`python -m pytest_mlhpc.vet.main SETTINGS` with scripted checks and a scripted child."""

from __future__ import annotations

import sys

from pytest_mlhpc.vet.main import leave, main
from pytest_mlhpc.vet.programs import Programs

if __name__ == "__main__":
    leave(main(sys.argv[1:], Programs("scripted_passive", "scripted_child")))
