"""The error of an answer names the call, the answer, and what to do."""

import pytest

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes import errors
from pytest_mlhpc.provision.kubernetes.errors import ApiCall, error_from_status

CALL = ApiCall("create", "jobs.batch", "x", "mine", "https://cluster:6443")


def status(code, message="", reason="", **details):
    return error_from_status(
        CALL, code, {"kind": "Status", "message": message, "reason": reason, "details": details}
    )


RBAC = 'jobs.batch is forbidden: User "me" cannot create resource "jobs" in API group "batch" in the namespace "mine"'
QUOTA = 'pods "x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = (
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
)
WEBHOOK = 'admission webhook "rules.example" denied the request: label queue-name is missing'
POLICY = "jobs.batch \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (400, "bad", errors.Invalid),
        (401, "Unauthorized", errors.Unauthorized),
        (403, RBAC, errors.Forbidden),
        (403, "", errors.Forbidden),
        (403, QUOTA, errors.QuotaExceeded),
        (403, 'pods "x" is forbidden: failed quota: small: must specify cpu,memory', errors.QuotaExceeded),
        (
            403,
            'pods "x" is forbidden: status unknown for quota: small, resources: pods',
            errors.QuotaExceeded,
        ),
        (403, SECURITY, errors.AdmissionDenied),
        (400, WEBHOOK, errors.AdmissionDenied),
        (403, WEBHOOK, errors.AdmissionDenied),
        (422, POLICY, errors.AdmissionDenied),
        (404, "no", errors.NotFound),
        (405, "no", errors.KubernetesError),
        (408, "late", errors.Unavailable),
        (409, "there", errors.Conflict),
        (410, "old", errors.Expired),
        (413, "large", errors.Invalid),
        (422, "wrong", errors.Invalid),
        (429, "busy", errors.Unavailable),
        (500, "etcd", errors.Unavailable),
        (503, "away", errors.Unavailable),
    ],
)
def test_a_status_has_its_class(code, message, kind):
    error = status(code, message)
    assert (type(error), error.status, isinstance(error, MlhpcError)) == (kind, code, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            status(409, 'jobs.batch "x" already exists', "AlreadyExists"),
            (
                'cannot create jobs.batch "x" in namespace "mine" of https://cluster:6443:'
                ' 409 AlreadyExists: jobs.batch "x" already exists'
            ),
        ),
        (status(403, RBAC), "needs the verb `create` on jobs.batch"),
        (status(403, QUOTA), "ask for less"),
        (status(403, WEBHOOK), "Change `kubernetes:`"),
        (status(401, "no"), "Log in to the cluster again"),
        (status(404, "nothing here"), "no kind jobs.batch: install what defines it"),
        (status(404, 'namespaces "mine" not found', name="mine", kind="namespaces"), "Set `namespace`"),
    ],
)
def test_the_text_says_what_was_answered_and_what_to_do(error, words):
    assert words in str(error)


@pytest.mark.parametrize(
    ("error", "unknown_kind", "exists"),
    [
        pytest.param(
            error_from_status(CALL, 404, "404 page not found\n"),
            True,
            False,
            id="a kind that the server lacks",
        ),
        pytest.param(
            status(404, 'pods "x" not found', name="x", kind="pods"),
            False,
            False,
            id="an object that it lacks",
        ),
        pytest.param(status(409, "", "AlreadyExists"), False, True, id="a taken name"),
        pytest.param(status(409, "", "Conflict"), False, False, id="a changed object"),
    ],
)
def test_what_is_missing_differs_from_what_is_there(error, unknown_kind, exists):
    assert (getattr(error, "unknown_kind", False), getattr(error, "exists", False)) == (unknown_kind, exists)


@pytest.mark.parametrize(
    ("header", "details", "expected"),
    [("7", {}, 7.0), ("", {"retryAfterSeconds": 3}, 3.0), ("2", {"retryAfterSeconds": 9}, 9.0), ("nan", {}, 0.0),
     ("-1", {}, 0.0), ("1e9", {}, 3600.0), ("Fri, 31 Dec 1999 23:59:59 GMT", {}, 0.0)],
)  # fmt: skip
def test_how_long_the_server_asks_to_be_left_alone(header, details, expected):
    error = error_from_status(CALL, 429, {"kind": "Status", "details": details}, header)
    assert error.retry_after_s == expected


@pytest.mark.parametrize(
    "answer", [None, [], 7, {}, {"kind": "Status", "details": [], "message": {}}, "\x00\x1b[31m"]
)
def test_an_odd_answer_still_makes_an_error(answer):
    error = error_from_status(CALL, 500, answer)
    assert (type(error), str(error).isprintable()) == (errors.Unavailable, True)


def test_endless_words_are_cut():
    assert len(str(status(500, "x" * 100_000))) < errors.MAX_MESSAGE + 200
