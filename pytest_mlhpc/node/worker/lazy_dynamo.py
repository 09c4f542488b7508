"""torch's compiler front end is not imported by runs that compile nothing: it takes as long as torch itself.

torch's optimizers import ``torch._dynamo`` when the first one is made, to mark their own functions as not to be compiled (torch 2.4
to 2.13: ``torch/_compile.py``, ``torch/optim/optimizer.py``); that took 1.4 s of a start of 2.4 s on two cores. A run without
``compile`` gets a stand-in with the two functions that they call. Whoever asks it for anything else gets the real module, from then on.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Mapping, MutableSequence, Optional, Sequence

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """Stands for ``torch._dynamo`` until something is asked of it that only the real one knows."""

    #: It is a package, whose modules :class:`SubmoduleFinder` finds.
    __path__: MutableSequence[str] = []  # noqa: RUF012 - the form that the import system wants

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def disable(fn: Optional[Callable[..., Any]] = None, *_: Any, **__: Any) -> Any:
        """Return *fn* as it is: nothing compiles it."""
        return fn if fn is not None else (lambda function: function)

    def __getattr__(self, name: str) -> Any:
        """Return what the real module has."""
        if name.startswith(
            "__"
        ):  # asked by the import system and by pickle; of a module without them these are none
            raise AttributeError(name)
        return getattr(real_module(), name)


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below ``torch._dynamo`` while the stand-in is there: the real package is imported first."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return how to load a module of the real package; one that it has loaded itself is taken as it is."""
        del path, target
        if not fullname.startswith(f"{NAME}."):
            return None
        real = real_module()
        if fullname in sys.modules:
            return importlib.machinery.ModuleSpec(fullname, self)
        return importlib.machinery.PathFinder.find_spec(fullname, real.__path__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        """Return the module that is loaded already."""
        return sys.modules.get(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it was executed."""


def install(parameters: Mapping[str, Any]) -> bool:
    """Put the stand-in into the place of ``torch._dynamo`` for a run that compiles nothing; return whether it was.

    torch has to be imported, and its compiler not yet.
    """
    torch = sys.modules.get("torch")
    if parameters.get("compile") or torch is None or NAME in sys.modules or not _has_dynamo():
        return False
    stand_in = StandIn(NAME, __doc__)
    sys.modules[NAME] = stand_in
    torch._dynamo = stand_in  # type: ignore[attr-defined]  # noqa: SLF001 - as importing it would
    sys.meta_path.insert(0, SubmoduleFinder())
    return True


def real_module() -> ModuleType:
    """Return the real ``torch._dynamo``, which takes the stand-in's place if that is still there."""
    if isinstance(sys.modules.get(NAME), StandIn):
        del sys.modules[NAME]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SubmoduleFinder)]
        sys.modules["torch"].__dict__.pop("_dynamo", None)
    return importlib.import_module(NAME)


def _has_dynamo() -> bool:
    """Return whether this torch has the module and defers it: 1.13 has none."""
    return (
        importlib.util.find_spec(NAME) is not None and importlib.util.find_spec("torch._compile") is not None
    )
