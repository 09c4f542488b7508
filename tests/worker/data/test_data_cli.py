import argparse
import subprocess
import sys

import pytest

from pytest_mlhpc.worker.data import cli
from pytest_mlhpc.worker.data.files import list_files, read_manifest


def call(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


def systems_file(tmp_path, **entry):
    lines = "".join(f"\n        {key}: {value}" for key, value in entry.items())
    path = tmp_path / "systems.yaml"
    path.write_text(
        "systems:\n  here:\n    description: this one\n    partitions:\n      main:\n        scheduler: local\n"
        "        launcher: plain\n        accelerator: cpu\n        nodes: {cores: 2, memory: 4GiB}\n"
        f"    datasets:\n      climate:{lines}\n"
    )
    return path


@pytest.fixture
def made(tmp_path, capsys):
    assert call("make", "deepcam", "--samples", 16, "--preset", "smoke", tmp_path / "set") == 0
    capsys.readouterr()
    return tmp_path / "set"


def test_make_writes_a_set_and_tells_its_size(tmp_path, capsys):
    assert call("make", "cosmoflow", "--samples", 16, "--preset", "smoke", tmp_path / "set") == 0
    out = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "set")
    assert (
        f"{tmp_path / 'set'}: cosmoflow, tfrecord-gzip, 18 files, {manifest.bytes} bytes" in out
    )  # 16 + 16 / 8
    assert len(list_files(tmp_path / "set" / "train")) == 16


def test_make_twice_says_that_the_set_was_there(made, capsys):
    assert call("make", "deepcam", "--samples", 16, "--preset", "smoke", made) == 0
    assert "(was there already, complete)" in capsys.readouterr().out


def test_make_refuses_a_folder_of_somebody_else(tmp_path, capsys):
    (tmp_path / "thesis").touch()
    assert call("make", "deepcam", "--samples", 1, "--preset", "smoke", tmp_path) == 4
    assert "is not empty and holds no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["make", "cosmoflwo", "--samples", 1, "d"],
            "there is no workload 'cosmoflwo' (did you mean 'cosmoflow'?)",
        ),
        (
            ["make", "cosmoflow", "--samples", 1, "--preset", "smal", "d"],
            "there is no preset 'smal' (did you mean 'small'?)",
        ),
        (["make", "cosmoflow", "--samples", 1, "--format", "zarr", "d"], "has no format 'zarr'"),
        (["make", "language_model", "--samples", 1, "d"], "has no file format to make a synthetic set in"),
        (["make", "cosmoflow", "--samples", 1, "--seed", "-3", "d"], "-3 is negative"),
    ],
)
def test_what_cannot_be_made_is_told_with_exit_code_4(tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 4
    assert text in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("samples", ["0", "-1", "many", "1e3"])
def test_a_number_of_samples_that_cannot_be_is_refused(capsys, samples):
    with pytest.raises(SystemExit):
        call("make", "cosmoflow", f"--samples={samples}", "d")
    assert "invalid number of samples value" in capsys.readouterr().err


def test_check_passes_a_whole_set_and_offers_its_digest(made, tmp_path, capsys):
    path = systems_file(tmp_path, path=made, kind="synthetic", files=19)
    assert call("check", "--systems-file", path, "--system", "here") == 0
    out = capsys.readouterr().out
    assert "here: climate" in out
    assert "ok, 19 files" in out
    assert f"digest: sha256:{read_manifest(made).sha256}" in out


def test_check_names_every_difference_with_exit_code_1(made, tmp_path, capsys):
    list_files(made)[3].write_bytes(b"")
    path = systems_file(tmp_path, path=made, kind="real", files=7, digest="'sha256:" + "0" * 64 + "'")
    assert call("check", "--systems-file", path) == 1
    out = capsys.readouterr().out
    for text in (
        "19 files, systems.yaml says 7",
        "has SHA-256",
        "is empty",
        "its manifest says",
        "systems.yaml says real",
    ):
        assert text in out


def test_check_names_a_set_that_is_not_there(tmp_path, capsys):
    path = systems_file(tmp_path, path=tmp_path / "gone", kind="real")
    assert call("check", "--systems-file", path) == 1
    assert "gone: is not there" in capsys.readouterr().out


def test_check_of_a_system_that_does_not_exist_is_a_usage_error(tmp_path, capsys):
    path = systems_file(tmp_path, path=tmp_path, kind="real")
    assert call("check", "--systems-file", path, "--system", "her") == 4
    assert "her" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy():
    code = (
        "import argparse, sys; from pytest_mlhpc.worker.data import cli; cli.add_arguments(argparse.ArgumentParser())\n"
        "print([m for m in ('torch', 'numpy', 'h5py', 'PIL', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam", "resnet50"])
def test_make_can_show_the_targets_plainly(tmp_path, workload):
    words = ["make", workload, "--samples", 2, "--validation", 0, "--preset", "smoke"]
    assert call(*words, "--learnable", tmp_path / "plain") == 0
    assert call(*words, tmp_path / "hidden") == 0
    plain, hidden = (read_manifest(tmp_path / name) for name in ("plain", "hidden"))
    assert plain.layout["sizes"] == {**hidden.layout["sizes"], "learnable": 1}
    (shown,), (noisy,) = (list_files(tmp_path / name / "train")[:1] for name in ("plain", "hidden"))
    assert shown.read_bytes() != noisy.read_bytes()
