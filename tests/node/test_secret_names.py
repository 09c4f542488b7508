"""A variable whose name sounds like a secret is in no record and no verdict, wherever variables are taken from."""

import pytest

from pytest_mlhpc.node.vet.checks.job_environment import safe
from pytest_mlhpc.node.worker.environment import variables

SECRETS = [
    "NCCL_PASS", "NCCL_CREDS", "NCCL_TOKEN", "OMP_AUTH", "FI_OPX_KEY", "GLOO_SECRET", "MKL_PASSPHRASE", "KMP_DB_PWD",
    "MIOPEN_COOKIE", "RCCL_BEARER", "TORCH_NCCL_PRIVATE_ID", "NCCL_password", "NCCL_Credential",
]  # fmt: skip
FIGURES = ["NCCL_DEBUG", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "KMP_AFFINITY", "FI_PROVIDER", "LD_PRELOAD"]


@pytest.mark.parametrize("name", SECRETS)
def test_what_may_be_a_secret_is_in_no_record_and_only_hashed_in_vetting(name):
    assert variables({name: "confidential"}) == {}
    assert safe(name, "confidential").startswith(f"{name}=sha256:")


@pytest.mark.parametrize("name", FIGURES)
def test_what_changes_figures_is_recorded_and_compared(name):
    assert variables({name: "2"}) == {f"env_{name}": "2"}
    assert safe(name, "2") == f"{name}=2"
