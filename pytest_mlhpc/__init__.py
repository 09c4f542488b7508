"""Continuous benchmarking of machine-learning training on HPC systems, as a pytest plugin.

The package is a flow that its file tree shows::

    options -> system -> jobs -> provision -> batch (vet -> launch -> worker) -> results -> judge -> record -> alert

``worker``, ``batch``, ``launch`` and a few modules of ``results`` are *payload*: they are shipped to compute nodes
and run there on Python 3.9 and torch 1.13 without this package installed. Everything else is the controller.
See ``docs/architecture.md``.
"""

__version__ = "0.1.0"
