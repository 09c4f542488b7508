"""Everything that a Kubernetes server, or its absence, can answer with; the words are the server's own.

::

    KubernetesError
    ├── NotFound          404: the object, its namespace, or (``unknown_kind``) the kind itself
    ├── Conflict          409: the name is taken (reason AlreadyExists) or the object changed (reason Conflict)
    ├── Forbidden         403: the account may not
    │   ├── QuotaExceeded      a quota of the namespace is used up
    │   └── AdmissionDenied    a webhook or a policy of the cluster refuses the object (403, 400 or 422)
    ├── Unauthorized      401: not or no longer known, also after credentials were read again
    ├── Gone              410: the place in the history from which a watch or a list was to go on is forgotten
    ├── Invalid           400 or 422: the server cannot take the object
    └── Unavailable       no answer, or none in time, 429, 5xx, an answer that is no Kubernetes: may work later
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.errors import MlhpcError

#: Most of a server's own words that an error quotes, in characters.
MAX_WORDS = 2000


@dataclass(frozen=True)
class Call:
    """What was asked, for the texts of errors: ``create jobs.batch "x" in namespace "y" of https://...``."""

    verb: str
    what: str  #: resource, with subresource: ``pods/log``
    name: str
    namespace: str
    server: str

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        name = f' "{self.name}"' if self.name else ""
        place = f' in namespace "{self.namespace}"' if self.namespace else ""
        return f"{self.verb} {self.what}{name}{place} of {self.server}"


class KubernetesError(MlhpcError):
    """A call failed. The text says what was asked of whom, what was answered, and what to do.

    Attributes:
        status: HTTP status, 0 where there was no answer.
        reason: the server's one word (``AlreadyExists``), may be empty.
        message: the server's own words on one line.
        details: ``details`` of the server's Status object, may be empty.
    """

    advice = ""

    def __init__(
        self,
        call: Call,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.call = call
        self.status = status
        self.reason = reason
        self.message = one_line(message)
        self.details = dict(details or {})
        head = " ".join(filter(None, [str(status or ""), reason]))
        answer = ": ".join(filter(None, [head, self.message])) or "no words"
        advice = self.hint()
        super().__init__(f"cannot {call}: {answer}" + (f". {advice}" if advice else ""))

    def hint(self) -> str:
        """Return what to do, a sentence; empty where the server's words say all."""
        return self.advice


class NotFound(KubernetesError):  # noqa: N818 - what the server says, as Kubernetes names it
    """404. ``unknown_kind``: the server has no such kind at all (a CRD that is not installed, an old server)."""

    @property
    def unknown_kind(self) -> bool:
        """Whether it is the kind that is not there, rather than an object or its namespace."""
        return not self.details.get("name")

    def hint(self) -> str:
        """Return what to do."""
        if self.unknown_kind:
            return f"This server has no kind {self.call.what}: install what defines it (its CRD), or choose another `kind`"
        if self.details.get("kind") == "namespaces":
            return "Set `namespace` to one that exists"
        return ""


class Conflict(KubernetesError):  # noqa: N818 - as above
    """409."""

    @property
    def exists(self) -> bool:
        """Whether the name is taken, rather than the object changed in between."""
        return self.reason == "AlreadyExists"


class Forbidden(KubernetesError):  # noqa: N818 - as above
    """403: the account lacks a right."""

    def hint(self) -> str:
        """Return what to do."""
        return f"The account needs the verb `{self.call.verb}` on {self.call.what}: ask whoever runs the cluster for it"


class QuotaExceeded(Forbidden):
    """403: the namespace's quota is used up, or demands requests and limits that the object lacks."""

    def hint(self) -> str:
        """Return what to do."""
        return "Wait until others end, ask for less, or ask for a larger quota"


class AdmissionDenied(Forbidden):
    """A webhook or a policy of the cluster refuses the object as it is."""

    def hint(self) -> str:
        """Return what to do."""
        return "Change `kubernetes:` of the partition so that the object is what this cluster's rules ask for"


class Unauthorized(KubernetesError):  # noqa: N818 - as above
    """401, again after the credentials were read anew."""

    advice = (
        "Log in to the cluster again (kubeconfig, token file or its plug-in); credentials were read anew once"
    )


class Gone(KubernetesError):  # noqa: N818 - as above
    """410: list again."""


class Invalid(KubernetesError):  # noqa: N818 - as above
    """400 or 422: the server cannot take what was sent."""


class Unavailable(KubernetesError):  # noqa: N818 - as above
    """Nobody answered, or not in time, or the server is too busy: what was asked may have been done all the same.

    ``retry_after_s``: how long the server asks to be left alone, in seconds; 0: it did not say.
    """

    retry_after_s: float = 0.0


def one_line(words: str) -> str:
    """Return *words* on one line, printable and not endless."""
    line = "; ".join(part.strip() for part in words.splitlines() if part.strip())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_WORDS else line[:MAX_WORDS] + " ..."


def error_of(call: Call, status: int, answer: Any, retry_after: str = "") -> KubernetesError:
    """Return the error for an answer that is none of 200 to 299.

    Args:
        call: what was asked.
        status: the HTTP status, or the ``code`` of a watch's ERROR event.
        answer: the Status object as JSON has it; any other text where that is what came.
        retry_after: the header of this name (RFC 9110, 10.2.3: seconds, or a date, which is not read).
    """
    found = answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}
    message = str(found.get("message") or ("" if isinstance(answer, dict) else answer))
    details = found.get("details")
    details = details if isinstance(details, dict) else {}
    kind = _kind(status, message)
    error = kind(call, message, status=status, reason=str(found.get("reason") or ""), details=details)
    if isinstance(error, Unavailable):
        error.retry_after_s = max(_seconds(retry_after), _seconds(details.get("retryAfterSeconds")))
    return error


def _kind(status: int, message: str) -> type[KubernetesError]:
    """Return the class for a status; what admission says is told by its words (k8s.io/apiserver/pkg/admission)."""
    lower = message.lower()
    if status in {400, 403, 422} and ("denied the request" in lower or "denied request" in lower):
        return AdmissionDenied  # webhooks choose their own status; ValidatingAdmissionPolicy: 422
    if (
        status == 403
    ):  # RBAC says `User "x" cannot ...`; all other refusals of this status come from admission
        if "exceeded quota" in lower or "failed quota" in lower or "insufficient quota" in lower:
            return QuotaExceeded
        return AdmissionDenied if "is forbidden: " in lower and " cannot " not in lower else Forbidden
    plain: dict[int, type[KubernetesError]] = {
        400: Invalid, 401: Unauthorized, 404: NotFound, 408: Unavailable, 409: Conflict, 410: Gone, 413: Invalid,
        422: Invalid, 429: Unavailable,
    }  # fmt: skip
    return plain.get(status, Unavailable if status >= 500 else KubernetesError)


def _seconds(value: Any) -> float:
    """Return a number of seconds between 0 and an hour; 0 for what is none."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return 0.0
    return min(found, 3600.0) if found > 0 else 0.0
