"""Every error that this package raises on purpose.

::

    MlhpcError
    ├── UsageError               what the user wrote cannot be run           (exit code 4 of pytest, 2 of mlhpc; nothing was started)
    │   ├── ConfigError          systems.yaml or another file, with file:line and key for each problem
    │   └── SpecError            what a test declares                   (its own error; exit code 1)
    ├── InfrastructureError      the machine's fault: a setup error of the test (mlhpc_infra_exit_code)
    │   ├── ProvisionError       rejected, never scheduled, image not pulled, not enough fit nodes
    │   ├── NodeFault            a node died or was found unfit under a run; it is named
    │   └── ProtocolError        payload and controller do not fit together, or their channel broke
    ├── RunFailure               a run was broken or slow: a failure in the call phase of the test
    └── StoreError               records, ledger or baseline files cannot be read or written; names the path
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class MlhpcError(Exception):
    """The root: catch this to catch all of them."""


class UsageError(MlhpcError):
    """What the user asked for cannot be run; nothing was written or started."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file or a test: where, what, and the nearest valid word if there is one."""

    where: str  #: ``file:line`` or a node id
    key: str  #: dotted path of the key or field, may be empty
    message: str
    suggestion: str = ""

    @property
    def what(self) -> str:
        """What is wrong, without where: ``key: message (did you mean 'x'?)``."""
        key = f"{self.key}: " if self.key else ""
        hint = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        return f"{key}{self.message}{hint}"

    def __str__(self) -> str:
        """Return one line: ``where: key: message (did you mean 'x'?)``."""
        return f"{self.where}: {self.what}"


class ProblemsError(UsageError):
    """A usage error that lists all its problems at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class ConfigError(ProblemsError):
    """A configuration file is wrong."""


class SpecError(ProblemsError):
    """A test declares a job that cannot be: unknown field, impossible value, two tests with one key."""


class InfrastructureError(MlhpcError):
    """Not the test's fault. ``outcome`` is one of :data:`pytest_mlhpc.store.record.INFRASTRUCTURE`."""

    def __init__(self, outcome: str, text: str) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome}: {text}")


class ProvisionError(InfrastructureError):
    """No nodes were to be had, with the scheduler's own message."""


class NodeFault(InfrastructureError):  # noqa: N818 - the field's word; a fault is an error
    """A node failed under a run."""

    def __init__(self, outcome: str, text: str, nodes: Sequence[str] = ()) -> None:
        self.nodes = tuple(nodes)
        super().__init__(outcome, text)


class ProtocolError(InfrastructureError):
    """Payload and controller disagree, or the channel between them broke."""


class RunFailure(MlhpcError):  # noqa: N818 - what pytest calls the outcome
    """A run measured nothing, measured something else, or was slower than its baseline.

    ``outcome`` is one of :data:`pytest_mlhpc.store.record.FAILURES`; a text that is *whole* starts without it.
    """

    def __init__(self, outcome: str, text: str, *, whole: bool = False) -> None:
        self.outcome = outcome
        super().__init__(text if whole else f"{outcome}: {text}")


class StoreError(MlhpcError):
    """A file of ours cannot be read or written; the text names the path."""


#: What users call accelerators -> what torch calls them, which no likeness of letters finds.
_SYNONYMS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "amd": "rocm",
    "hip": "rocm",
    "intel": "xpu",
    "graphcore": "ipu",
    "cerebras": "wse",
}


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the valid word that *word* was most likely meant to be, or an empty string."""
    import difflib

    known = list(valid)
    if (meant := _SYNONYMS.get(word.lower())) in known:
        return meant
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), "")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the end of a clause, or an empty string."""
    found = nearest(word, valid)
    return f" (did you mean {found!r}?)" if found else ""
