"""Settings of channels: those that cannot work are refused, and none shows a secret."""

from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.alert.channels import alertmanager, gitlab_issue, smtp, webhook

KINDS = {"smtp": smtp, "gitlab_issue": gitlab_issue, "alertmanager": alertmanager}
CASES = yaml.safe_load(Path(__file__).with_name("wrong_settings.yaml").read_text(encoding="utf-8"))
WRONG = [(kind, change, why) for kind, case in CASES.items() for change, why in case["wrong"]]
SECRETS = {"token": "s3cr3t", "secret": "s3cr3t"}


def settings(kind, **changes):
    fields = {**CASES[kind]["good"], **changes}
    return KINDS[kind].Settings(
        **{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
    )


@pytest.mark.parametrize(("kind", "change", "why"), WRONG)
def test_settings_that_cannot_work_are_refused_without_showing_a_secret(kind, change, why):
    with pytest.raises(ValueError, match=why) as caught:
        settings(kind, **change)
    assert "r3t" not in str(caught.value)


@pytest.mark.parametrize(
    "one",
    [
        # A password may go unprotected to this machine alone.
        settings("smtp", user="me", password="s3cr3t", security="none", host="localhost"),
        settings("gitlab_issue"),
        webhook.Settings("https://chat.example.org/hooks/s3cr3t", **SECRETS),
    ],
    ids=lambda one: type(one).__module__,
)
def test_settings_show_no_secret(one):
    assert "s3cr3t" not in repr(one)


def test_the_address_of_gitlab_may_be_that_of_its_api():
    one = settings("gitlab_issue", url="https://gitlab.example.org/api/v4/")
    assert one.url == "https://gitlab.example.org"
