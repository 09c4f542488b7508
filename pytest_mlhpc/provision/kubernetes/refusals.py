"""From an answer of the API server to an error of ours: its outcome, the server's own words, and what to do."""

from __future__ import annotations

from typing import Final

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.kubernetes import errors

_OUTCOMES: Final[tuple[tuple[type[errors.KubernetesError], str], ...]] = (
    (errors.QuotaExceeded, "quota_exceeded"),
    (errors.AdmissionDenied, "admission_denied"),
    (errors.Forbidden, "forbidden"),
    (errors.Unauthorized, "unauthorized"),
    (errors.Unavailable, "never_scheduled"),
)


#: What k8s.io/apiserver/pkg/admission/plugin/webhook says where a webhook cannot be asked and its failurePolicy is Fail.
_WEBHOOK: Final = "failed calling webhook"


def refused(error: errors.KubernetesError, waited: str = "") -> ProvisionError:
    """Return why an object was not created; the error's text says which, and what to do.

    *waited* is how long was waited for another answer, in words.
    """
    outcome = next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "rejected")
    if _WEBHOOK in error.message:
        outcome = "admission_denied"
    return ProvisionError(outcome, "; ".join(filter(None, [str(error), waited, _advice(error)])))


def _advice(error: errors.KubernetesError) -> str:
    if isinstance(error, errors.Conflict) and error.exists:
        return "an object of this name is there and is not ours: delete it and run again"
    if type(error) is errors.Forbidden:
        return "docs/kubernetes.md has the Role that is needed"
    if _WEBHOOK in error.message:
        return "whoever runs the cluster has to mend its webhook"
    return ""
