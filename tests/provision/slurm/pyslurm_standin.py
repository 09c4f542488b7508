"""A stand-in for the module pyslurm, strict: only the names and signatures of its own source distribution exist.

It knows nothing of Slurm: what calls return is given by the test. An unknown name raises AttributeError, a wrong argument
TypeError, as in pyslurm, whose classes are compiled ones without a ``__dict__``.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
from pathlib import Path

API = json.loads((Path(__file__).parent / "pyslurm_25_11_2.json").read_text(encoding="utf-8"))


class Collection(dict):
    """What ``load`` of a plural class returns: pyslurm's keeps a map of each cluster and iterates over their items."""


def signature(text):
    """Return the signature of recorded parameters like ``job_id, cluster = ...``."""
    parameters = []
    for part in filter(None, text.split(", ")):
        name, equals, _ = part.partition(" = ")
        if name.startswith("**"):
            parameters.append(inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            default = ... if equals else inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            )
    return inspect.Signature(parameters)


def standin(answers):
    """Return the module and the list of its calls: (function, arguments by name, the object's set attributes).

    *answers*: "Job.cancel" -> what the call returns, an exception to raise, or a function of the arguments.
    """
    module, calls = types.ModuleType("pyslurm"), []
    module.db, module.slurmctld = types.ModuleType("pyslurm.db"), types.ModuleType("pyslurm.slurmctld")
    module.__version__ = API["version"]
    module.PyslurmError = type("PyslurmError", (Exception,), {})
    module.RPCError = type("RPCError", (module.PyslurmError,), {})
    module.slurmctld.ping_primary = lambda: None

    def called(name, arguments, values):
        calls.append((name, arguments, values))
        answer = answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer(**arguments) if callable(answer) else answer

    for name, api in API["classes"].items():
        if "members" in api:
            setattr(module, name, enum.Flag(name, api["members"]))
            continue
        where, _, short = name.rpartition(".")
        setattr(module.db if where else module, short, _class(name, api, called))
    return module, calls


class Strict:
    """The base of all classes: no attribute but the recorded ones, which are None until they are set."""

    recorded_name = ""
    recorded_attributes = frozenset()
    recorded_init = inspect.Signature()

    def __init__(self, *args, **kwargs):
        bound = dict(self.recorded_init.bind(*args, **kwargs).arguments)
        bound |= bound.pop("kwargs", {})
        for key, value in bound.items():
            # What Job and JobStep are made of is kept under the name of its attribute.
            name = {"Job.job_id": "id", "JobStep.step_id": "id"}.get(f"{self.recorded_name}.{key}", key)
            setattr(self, name, value)

    def __getattr__(self, key):
        self._known(key)

    def __setattr__(self, key, value):
        self._known(key)
        object.__setattr__(self, key, value)

    def _known(self, key):
        if key not in self.recorded_attributes:
            raise AttributeError(f"pyslurm.{self.recorded_name} has no attribute {key!r}")


def _class(name, api, called):
    def method(key, text):
        def run(self, *args, **kwargs):
            return called(f"{name}.{key}", signature(text).bind(*args, **kwargs).arguments, dict(vars(self)))

        return run

    def static(key, text):
        def run(*args, **kwargs):
            return called(f"{name}.{key}", signature(text).bind(*args, **kwargs).arguments, {})

        return staticmethod(run)

    body = {
        "recorded_name": name,
        "recorded_attributes": frozenset(api.get("attributes", ())),
        "recorded_init": signature(api["init"] or ""),
    }
    body |= {key: method(key, text) for key, text in api.get("methods", {}).items()}
    body |= {key: static(key, text) for key, text in api.get("static", {}).items()}
    return type(name.rpartition(".")[2], (Strict,), body)


def filled(cls, **values):
    """Return an object as a query would: any known attribute may be set, unset ones are None."""
    it = cls.__new__(cls)
    for key, value in values.items():
        setattr(it, key, value)
    return it
