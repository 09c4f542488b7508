"""Errors of calls to a Kubernetes API server, their outcomes, and the delay before a retry.

Open it to learn how an HTTP status becomes an error, or an error the outcome of an allocation::

    KubernetesError
    ├── NotFound          404: no such object, namespace or (``unknown_kind``) kind
    ├── Conflict          409: the name is taken (AlreadyExists), or the object was changed (Conflict)
    ├── Forbidden         403: the account lacks a right
    │   ├── QuotaExceeded      a quota of the namespace is used up
    │   └── AdmissionDenied    a webhook or policy refuses the object (403, 400 or 422)
    ├── Unauthorized      401: also after the credentials were read again
    ├── Expired           410: the resource version of a watch or list is too old
    ├── Invalid           400 or 422: the server cannot process the object
    └── Unavailable       no answer, a timeout, 429, 5xx, or no Kubernetes server: may work later
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.store.locations import page

#: Longest quotation of a server's message, in characters.
MAX_MESSAGE = 2000


@dataclass(frozen=True)
class ApiCall:
    """One API call, as error texts name it: ``create jobs.batch "x" in namespace "y" of https://...``."""

    verb: str
    what: str  #: resource, with subresource: ``pods/log``
    name: str
    namespace: str
    server: str

    def __str__(self) -> str:
        """Return the call as part of a sentence."""
        name = f' "{self.name}"' if self.name else ""
        place = f' in namespace "{self.namespace}"' if self.namespace else ""
        return f"{self.verb} {self.what}{name}{place} of {self.server}"


class KubernetesError(MlhpcError):
    """A call failed. The text names the call, the answer, and what to do.

    Attributes:
        status: HTTP status; 0 if the server did not answer.
        reason: the server's reason, such as ``AlreadyExists``; may be empty.
        message: the server's message on one line.
        details: ``details`` of the server's Status object; may be empty.
    """

    advice = ""

    def __init__(
        self,
        call: ApiCall,
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
        answer = ": ".join(filter(None, [head, self.message])) or "no message"
        advice = self.hint()
        super().__init__(f"cannot {call}: {answer}" + (f". {advice}" if advice else ""))

    def hint(self) -> str:
        """Return what to do, as a sentence; empty if the server's message says it."""
        return self.advice.format(verb=self.call.verb, what=self.call.what)


class NotFound(KubernetesError):  # noqa: N818 - what the server says, as Kubernetes names it
    """404. With ``unknown_kind`` the server lacks the kind itself, as a CRD is not installed or the server is old."""

    @property
    def unknown_kind(self) -> bool:
        """Whether the kind is missing, rather than an object or its namespace."""
        return not self.details.get("name")

    def hint(self) -> str:
        """Return what to do."""
        if self.unknown_kind:
            return f"This server has no kind {self.call.what}: install what defines it (its CRD), or choose another `kind`"
        if self.details.get("kind") == "namespaces":
            return "Set `namespace` to one that exists"
        return ""


class Conflict(KubernetesError):  # noqa: N818 - as above
    """409: another object has the name, or the object was changed meanwhile."""

    @property
    def exists(self) -> bool:
        """Whether the name is taken."""
        return self.reason == "AlreadyExists"


class Forbidden(KubernetesError):  # noqa: N818 - as above
    """403: the account lacks a right."""

    advice = "The account needs the verb `{verb}` on {what}: ask the cluster's administrator for it"


class QuotaExceeded(Forbidden):
    """403: the namespace's quota is used up, or requires requests and limits that the object lacks."""

    advice = "Wait until others end, ask for less, or ask for a larger quota"


class AdmissionDenied(Forbidden):
    """A webhook or policy of the cluster refuses the object."""

    advice = "Change `kubernetes:` of the partition so that the object is what this cluster's rules ask for"


class Unauthorized(KubernetesError):  # noqa: N818 - as above
    """401, also after the credentials were read again."""

    advice = (
        "Log in to the cluster again (kubeconfig, token file or its plug-in); credentials were read anew once"
    )


class Expired(KubernetesError):  # noqa: N818 - as above
    """410: the objects have to be listed again."""


class Invalid(KubernetesError):  # noqa: N818 - as above
    """400 or 422: the server cannot process the object."""


class Unavailable(KubernetesError):  # noqa: N818 - as above
    """The server did not answer in time, or is too busy. The call may have taken effect nevertheless.

    ``retry_after_s`` is the delay that the server asks for, in seconds; 0 if it asks for none.
    """

    retry_after_s: float = 0.0


def one_line(text: str) -> str:
    """Return *text* on one line, printable, and cut after MAX_MESSAGE characters."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + " ..."


def error_from_status(call: ApiCall, status: int, answer: Any, retry_after: str = "") -> KubernetesError:
    """Return the error for an HTTP status other than 200 to 299.

    Args:
        call: the call that failed.
        status: the HTTP status, or the ``code`` of a watch's ERROR event.
        answer: the parsed Status object, or the text of any other answer.
        retry_after: the Retry-After header (RFC 9110, 10.2.3) in seconds; a date is ignored.
    """
    found = answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}
    message = str(found.get("message") or ("" if isinstance(answer, dict) else answer))
    details = found.get("details")
    details = details if isinstance(details, dict) else {}
    kind = _error_class(status, message)
    error = kind(call, message, status=status, reason=str(found.get("reason") or ""), details=details)
    if isinstance(error, Unavailable):
        error.retry_after_s = max(_seconds(retry_after), _seconds(details.get("retryAfterSeconds")))
    return error


#: What admission says of quotas; the last text is of one whose use the quota controller has not counted yet.
_QUOTA: Final = ("exceeded quota", "failed quota", "insufficient quota", "status unknown for quota")


def _error_class(status: int, message: str) -> type[KubernetesError]:
    """Return the class for a status. Only its text shows that admission refused (k8s.io/apiserver/pkg/admission)."""
    lower = message.lower()
    if status in {400, 403, 422} and ("denied the request" in lower or "denied request" in lower):
        return AdmissionDenied  # webhooks choose their own status; ValidatingAdmissionPolicy: 422
    if status == 403:  # RBAC says `User "x" cannot ...`; admission words all other refusals
        if any(text in lower for text in _QUOTA):
            return QuotaExceeded
        return AdmissionDenied if "is forbidden: " in lower and " cannot " not in lower else Forbidden
    plain: dict[int, type[KubernetesError]] = {
        400: Invalid, 401: Unauthorized, 404: NotFound, 408: Unavailable, 409: Conflict, 410: Expired, 413: Invalid,
        422: Invalid, 429: Unavailable,
    }  # fmt: skip
    return plain.get(status, Unavailable if status >= 500 else KubernetesError)


def _seconds(value: Any) -> float:
    """Return a number of seconds from 0 to 3600; 0 for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return 0.0
    return min(found, 3600.0) if found > 0 else 0.0


_OUTCOMES: Final[tuple[tuple[type[KubernetesError], str], ...]] = (
    (QuotaExceeded, "quota_exceeded"),
    (AdmissionDenied, "admission_denied"),
    (Forbidden, "forbidden"),
    (Unauthorized, "unauthorized"),
    (Unavailable, "never_scheduled"),
)

#: Message of k8s.io/apiserver/pkg/admission/plugin/webhook if a webhook with failurePolicy Fail cannot be called.
_WEBHOOK: Final = "failed calling webhook"


def provision_error(error: KubernetesError, waited: str = "") -> ProvisionError:
    """Return the ProvisionError for an object that was not created, with its outcome and advice.

    *waited* says how long the creation was retried; empty if it was not.
    """
    outcome = next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "rejected")
    if _WEBHOOK in error.message:
        outcome = "admission_denied"
    return ProvisionError(outcome, "; ".join(filter(None, [str(error), waited, _advice_of(error)])))


def _advice_of(error: KubernetesError) -> str:
    if isinstance(error, Conflict) and error.exists:
        return "another object has this name and is not ours: delete it and run again"
    if type(error) is Forbidden:
        return f"{page('kubernetes')} has the Role that is needed"
    if _WEBHOOK in error.message:
        return "the cluster's administrator has to repair the webhook"
    return ""


#: First delay, doubled after each failure, and longest, in seconds; client-go's reflector waits 0.8 to 30.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
#: Delay after a refusal, which only people can change, in seconds.
REFUSED_DELAY_S = 60.0


def retry_delay(failures: int, error: KubernetesError) -> float:
    """Return the delay after *failures* failures in a row (at least one), in seconds.

    The delay is at least what the server asked for. A random part keeps clients from returning together.
    """
    if not isinstance(error, Unavailable) and error.status not in {0, 410}:
        pause = REFUSED_DELAY_S
    else:
        pause = min(FIRST_DELAY_S * 2.0 ** min(failures - 1, 10), LONGEST_DELAY_S)
    asked = error.retry_after_s if isinstance(error, Unavailable) else 0.0
    return max(pause, asked) * random.uniform(1.0, 1.25)  # noqa: S311 - spreads load, guards nothing
