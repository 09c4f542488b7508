"""Python imports this at its start, because its folder stands first on PYTHONPATH. It starts the hook, then steps aside.

The program must never notice: nothing that goes wrong here gets out, and a ``sitecustomize`` that this one hides is run.
"""
# pathlib is not imported: every Python that the program starts has this, and it would take longer than all else here.

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

_OWN = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _OWN]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    import mlhpc_screen_hook  # type: ignore[import-not-found]  # it lies beside this file

    mlhpc_screen_hook.start()
with contextlib.suppress(ImportError):
    _run_hidden()
