import shutil
import subprocess
import sys

import pytest
import yaml
from tables import table

from pytest_mlhpc.cli import main
from pytest_mlhpc.node.worker.data.dataset_files import list_files, read_manifest


@pytest.fixture
def call(capsys):
    """Run the command; return its exit code, and what it printed on its output and its error output."""

    def run(*arguments):
        code = main(["data", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def make(workload, samples=16):
    return ["make", workload, "--samples", samples, "--preset", "smoke"]


@pytest.fixture
def check(call, tmp_path):
    """Check the set that a file of systems describes."""

    def run(*options, path, **entry):
        main = {"scheduler": "local", "launcher": "plain", "accelerator": "cpu"}
        main["nodes"] = {"cores": 2, "memory": "4GiB"}
        system = {"description": "this one", "partitions": {"main": main}}
        system["datasets"] = {"climate": {"path": str(path), **entry}}
        (tmp_path / "systems.yaml").write_text(yaml.safe_dump({"systems": {"here": system}}))
        return call("check", "--systems-file", tmp_path / "systems.yaml", *options)

    return run


def test_make_writes_a_set_and_prints_its_size(call, tmp_path):
    code, out, _ = call(*make("cosmoflow"), tmp_path / "set")
    assert code == 0
    size = read_manifest(tmp_path / "set").bytes
    assert f"{tmp_path / 'set'}: cosmoflow, tfrecord-gzip, 18 files, {size} bytes" in out  # 16 + 16 / 8
    assert len(list_files(tmp_path / "set" / "train")) == 16


def test_make_twice_says_that_the_set_was_there(call, made_set):
    code, out, _ = call(*make("deepcam"), made_set("deepcam", samples=16, validation=2))
    assert code == 0
    assert "(was there already, complete)" in out


@pytest.mark.parametrize(("arguments", "text"), table("data_formats")["make"])
def test_what_cannot_be_made_is_refused_with_exit_code_4(call, tmp_path, arguments, text):
    code, _, error = call("make", *arguments, tmp_path / "d")
    assert code == 2
    assert text in error
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("samples", ["0", "-1", "many", "1e3"])
def test_a_number_of_samples_that_cannot_be_is_refused(call, samples):
    code, _, err = call("make", "cosmoflow", f"--samples={samples}", "d")
    assert (code, "Invalid value for '--samples'" in err) == (2, True)


def test_check_passes_a_whole_set_and_offers_its_digest(check, made_set):
    root = made_set("deepcam", samples=16, validation=2)
    code, out, _ = check("--system", "here", path=root, kind="synthetic", files=19)
    assert code == 0
    texts = ["here: climate", "ok, 19 files", f"digest: sha256:{read_manifest(root).sha256}"]
    assert [text for text in texts if text not in out] == []


def test_check_names_every_difference_with_exit_code_1(check, made_set, tmp_path):
    root = shutil.copytree(made_set("deepcam", samples=16, validation=2), tmp_path / "set")
    list_files(root)[3].write_bytes(b"")
    code, out, _ = check(path=root, kind="real", files=7, digest="sha256:" + "0" * 64)
    assert code == 1
    files, kind = "19 files, systems.yaml says 7", "systems.yaml says real"
    texts = [files, "has SHA-256", "is empty", "its manifest says", kind]
    assert [text for text in texts if text not in out] == []


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [([], 1, "gone: is not there"), (["--system", "her"], 2, "her")],
    ids=["a set that is not there", "a system that does not exist"],
)
def test_check_names(check, tmp_path, options, code, text):
    found, *printed = check(*options, path=tmp_path / "gone", kind="real")
    assert (found, text in printed[code == 2]) == (code, True)


def test_the_command_imports_nothing_heavy():
    code = (
        "import sys; from pytest_mlhpc.cli import data\n"
        "print([m for m in ('torch', 'numpy', 'h5py', 'PIL', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam", "resnet50"])
def test_make_can_show_the_targets_plainly(call, tmp_path, workload):
    for words in (["--learnable", tmp_path / "plain"], [tmp_path / "hidden"]):
        assert call(*make(workload, 2), "--validation", 0, *words)[0] == 0
    plain, hidden = (read_manifest(tmp_path / name) for name in ("plain", "hidden"))
    assert plain.layout["sizes"] == {**hidden.layout["sizes"], "learnable": 1}
    shown, noisy = (list_files(tmp_path / name / "train")[0] for name in ("plain", "hidden"))
    assert shown.read_bytes() != noisy.read_bytes()
