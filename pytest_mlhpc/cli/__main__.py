"""``python -m pytest_mlhpc.cli``."""

import sys

from pytest_mlhpc.cli import main

sys.exit(main())
