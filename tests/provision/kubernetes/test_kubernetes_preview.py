"""Whether a run can be rendered at all is known before anything is submitted."""

from __future__ import annotations

import pytest
import yaml
from manifests import ENVIRONMENT, partition

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.preview import preview


def test_a_preview_is_what_could_be_created():
    head, _, rest = preview(partition(service=True), ENVIRONMENT).partition("\n")
    assert head.startswith("# Created before these: ConfigMap mlhpc-00000000-0000-7000-8000-000000000000")
    service, job = yaml.safe_load_all(rest)
    assert (service["kind"], job["kind"], job["spec"]["completions"]) == ("Service", "Job", 2)


def test_a_preview_that_cannot_be_made_names_its_place():
    with pytest.raises(UsageError, match=r"site:part, environment default: .*spec\.backoffLimit"):
        preview(partition(manifest={"spec": {"backoffLimit": 3}}), ENVIRONMENT)
