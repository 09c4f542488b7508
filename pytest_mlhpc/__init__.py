"""Continuous benchmarking of machine-learning training on HPC systems, as a pytest plugin.

The package is a flow that its file tree shows::

    options -> config -> jobs -> provision -> node (batch, vet, launch, worker) -> judge -> store -> alert

``node`` is shipped to compute nodes, where it runs on Python 3.9 and torch 1.13 without this package installed. Everything
else is the controller. See ``docs/architecture.md``.

The public names are the decorators of tests and the types of fixtures. They are imported when they are asked for, as every
command of ``mlhpc`` imports this file too.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Target as System
    from pytest_mlhpc.jobs.builds import build, prepare
    from pytest_mlhpc.jobs.decorators import collective, nodes, program, roofline, storage, train, workload
    from pytest_mlhpc.jobs.metrics import Metric
    from pytest_mlhpc.session.allocation import Allocation, Vetting
    from pytest_mlhpc.session.run import Baseline, Run

__all__ = [
    "Allocation", "Baseline", "Metric", "Run", "System", "Vetting",
    "build", "collective", "nodes", "prepare", "program", "roofline", "storage", "train", "workload",
]  # fmt: skip

__version__ = "0.2.0"

#: Public name -> module, and its name there where that is another.
_HOMES = {
    "Allocation": ("pytest_mlhpc.session.allocation", "Allocation"),
    "Baseline": ("pytest_mlhpc.session.run", "Baseline"),
    "Metric": ("pytest_mlhpc.jobs.metrics", "Metric"),
    "build": ("pytest_mlhpc.jobs.builds", "build"),
    "prepare": ("pytest_mlhpc.jobs.builds", "prepare"),
    "Run": ("pytest_mlhpc.session.run", "Run"),
    "System": ("pytest_mlhpc.config.model", "Target"),
    "Vetting": ("pytest_mlhpc.session.allocation", "Vetting"),
}


if not TYPE_CHECKING:  # a checker would believe every name

    def __getattr__(name: str) -> object:
        """Import a public name (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module, attribute = _HOMES.get(name, ("pytest_mlhpc.jobs.decorators", name))
        return getattr(import_module(module), attribute)
