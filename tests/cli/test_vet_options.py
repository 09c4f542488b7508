"""What people type after `mlhpc vet`, and what they read when it cannot be done."""

import re
from types import SimpleNamespace

import cli_calls
import pytest

from pytest_mlhpc.cli.vet import NAMES, settings_of
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.plan import VetSettings


def parsed(*words: str, level: str = "quick") -> VetSettings:
    return settings_of(SimpleNamespace(level=level, **cli_calls.parsed("vet", level, *words)))


def test_without_options_it_is_quick_and_needs_all_nodes():
    assert parsed() == VetSettings(budget_s=60.0, require_comparison=False)
    assert parsed("--require-comparison") == VetSettings(budget_s=60.0)
    assert parsed(level="deep").budget_s == 600.0


def test_relative_paths_mean_the_folder_where_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = parsed("--output", "vet", "--for", "job", "--checkpoint", "ckpt", "--data", "/data")
    paths = {"checkpoint": str(tmp_path / "ckpt"), "data": "/data"}
    assert (settings.out, settings.wanted.paths) == (str(tmp_path / "vet"), paths)


def test_a_job_is_described():
    wanted = parsed("--for", "job", "--hours", "12", "--ranks", "4", "--checkpoint-size", "40GiB").wanted
    assert (wanted.purpose, wanted.hours, wanted.ranks, wanted.checkpoint_bytes) == ("job", 12.0, 4, 40 << 30)


def test_what_nodes_must_have_is_described():
    words = ["cores=64", "memory=500GiB", "model=H100", "driver=550"]
    wanted = parsed("--devices", "4", *(part for word in words for part in ("--expect", word))).wanted
    assert (wanted.devices, wanted.cores, wanted.memory, wanted.device_model) == (4, 64, 500 << 30, "H100")
    assert wanted.expect == {"driver": "550"}


def test_a_policy_file_changes_bounds(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('[bounds."peers.share"]\nfail = 0.1\nsource = "ours"\ndate = "2026-11-21"\n')
    assert [(bound.key, bound.fail) for bound in parsed("--policy", str(path)).bounds] == [
        ("peers.share", 0.1)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--need", "-1"], "--need -1 is no sensible number"),
        (["--budget", "0"], "--budget 0 is too short: give it at least 5 s"),
        (["--budget", "1"], "--budget 1 is too short: give it at least 5 s"),
        (["--budget", "nan"], "--budget nan is no sensible number"),
        (["--hours", "3"], "--hours is about a job: give --for job as well"),
        (["--require-comparison", "--unknown", "warn"], "--require-comparison and --unknown warn contradict"),
        (["--expect", "cores"], "--expect 'cores': write it as NAME=VALUE"),
        (["--expect", "cores=many"], "--expect cores=many: many is no number of cores"),
        (["--expect", "cores=0"], "0 is no number of cores"),
        (
            ["--expect", "coers=4"],
            f"--expect coers=4: no check reads 'coers'; there are {', '.join(NAMES)} (did you mean 'cores'?)",
        ),
        (["--expect", "memory=much"], "--expect memory=much: 'much' is not a size"),
        (["--expect", "memory=500"], "'500' without a unit is 500B; did you mean 500MiB?"),
        (["--expect", "ecc=of"], "'of' is none of on, off, any (did you mean 'off'?)"),
        (["--checkpoint-size", "much"], "--checkpoint-size 'much'"),
        (["--python", "no-such-python"], "--python no-such-python: there is no such program here"),
        (["--policy", "/nonexistent.toml"], "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_said(words, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parsed(*words)


@pytest.mark.parametrize(
    "words", [["depp"], ["--need", "x"], ["--need", "-1"], ["--max-age", "soon"], ["history", "--since", "x"]]
)
def test_usage_errors_of_vetting_are_exit_code_two(words, mlhpc):
    assert "Error: " in mlhpc("vet", *words, code=2).err


def test_more_nodes_than_there_are_is_a_usage_error(mlhpc, monkeypatch):
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert (
        mlhpc("vet", "--need", "3", "--no-load", code=2).err == "mlhpc vet: --need 3, but there is 1 node\n"
    )


def test_help_lists_all_names_that_may_be_expected(mlhpc):
    said = re.sub(r"\s+", " ", mlhpc("vet", "quick", "--help").out)
    assert f"Names: {', '.join(NAMES)}." in said
