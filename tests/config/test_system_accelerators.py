"""A look into /dev, and only if something is there a process that asks torch."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from pytest_mlhpc.config import this_machine
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.config.this_machine import Accelerators, device_files, find_accelerators
from pytest_mlhpc.errors import UsageError

TORCH = Path(__file__).with_name("torch.py.txt").read_text(encoding="utf-8")


class Stage:
    """An interpreter's torch, made of a few lines, that counts how often it is imported; and a machine's /dev."""

    def __init__(self, folder: Path) -> None:
        self.package, self.calls = folder / "site/torch", folder / "calls"
        self.package.mkdir(parents=True)
        self.calls.touch()
        self.environ = {**os.environ, "PYTHONPATH": str(folder / "site"), "CALLS": str(self.calls)}
        self.state, self.dev = folder / "state", folder / "dev"
        self.dev.mkdir()
        (self.dev / "nvidia0").touch()
        self.write(TORCH.format(available=True))

    def write(self, text: str, version: str = "hip = None\n") -> None:
        (self.package / "__init__.py").write_text(text)
        (self.package / "version.py").write_text(version)

    def find(self, **environ: str) -> Accelerators:
        return find_accelerators(sys.executable, self.state, {**self.environ, **environ}, dev=self.dev)

    @property
    def imports(self) -> int:
        return len(self.calls.read_text())


@pytest.fixture
def torch(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_only_files_of_accelerators_count(tmp_path: Path):
    (tmp_path / "dri").mkdir()
    for name in ("nvidiactl", "tty", "nvidia-uvm", "kfd", "dri/card0", "dri/renderD128", "nvidia10"):
        (tmp_path / name).touch()
    names = [str(Path(path).relative_to(tmp_path)) for path in device_files(tmp_path)]
    assert names == ["dri/renderD128", "kfd", "nvidia10"]


def test_without_a_device_file_nothing_is_started(torch: Stage):
    (torch.dev / "nvidia0").unlink()
    assert "no device file" in torch.find().reason
    assert (torch.imports, torch.state.exists()) == (0, False)


def test_what_torch_sees_is_found_and_asked_once_per_boot(torch: Stage):
    first, second = torch.find(), torch.find()
    assert first == second == Accelerators("cuda", ("NVIDIA H200", "NVIDIA H200"))
    assert (first.model, torch.imports) == ("NVIDIA H200", 1)


def test_a_driver_that_was_repaired_is_detected_in_the_same_boot(torch: Stage):
    torch.write(TORCH.format(available="os.path.exists(os.environ['CALLS'] + '.mended')"))
    broken = torch.find()
    assert broken.kind == ""
    assert broken.reason.endswith("sees no accelerator: Found no NVIDIA driver on your system.")

    Path(f"{torch.calls}.mended").touch()
    assert torch.find().kind == "cuda"


def test_another_torch_is_asked_again(torch: Stage):
    torch.find()
    torch.write(TORCH.format(available=False))
    os.utime(torch.package / "version.py", ns=(1, 1))
    found = torch.find()
    assert (found.kind, torch.imports) == ("", 2)
    assert all(words in found.reason for words in ("torch 9.9", "sees no accelerator"))


def test_other_visible_devices_are_another_question(torch: Stage):
    torch.find()
    torch.find(CUDA_VISIBLE_DEVICES="1")
    assert torch.imports == 2


def test_a_damaged_answer_is_asked_again(torch: Stage):
    torch.find()
    for path in (torch.state / "cache").iterdir():
        path.write_text('{"found": 3')
    assert (torch.find().kind, torch.imports) == ("cuda", 2)


def test_a_state_directory_that_cannot_be_written_is_no_hindrance(torch: Stage):
    torch.state.touch()
    assert torch.find().kind == "cuda"


def test_a_rocm_build_is_distinguished_from_cuda(torch: Stage):
    torch.write(TORCH.format(available=True), version="hip = '6.2'\n")
    assert torch.find().kind == "rocm"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open')",
            "torch cannot be imported: ImportError: libcudart.so.12",
        ),
        ("raise SystemError('x')", "torch cannot be imported: SystemError"),
        ("import os; os._exit(7)", "ended with status 7"),
        ("import os; os.abort()", "ended with status -6"),
        (
            "print('chatter')\n" + TORCH.replace("{available}", "1 / 0"),
            "cannot ask its devices: division by zero",
        ),
    ],
)
def test_a_broken_torch_is_an_answer(torch: Stage, text, reason):
    torch.write(text)
    found = torch.find()
    assert (found.kind, reason in found.reason) == ("", True), found.reason


def test_an_interpreter_that_does_not_exist_is_named(torch: Stage):
    found = find_accelerators("/nowhere/python", None, {}, dev=torch.dev)
    assert found.reason == "'/nowhere/python' cannot be started to ask torch: No such file or directory"


@pytest.mark.servers
def test_a_driver_that_hangs_is_given_up(monkeypatch, torch: Stage):
    monkeypatch.setattr(this_machine, "PROBE_LIMIT_S", 1)
    torch.write("import time; time.sleep(6000)")
    assert "did not answer within 1 s" in torch.find().reason


@pytest.mark.servers
def test_the_probe_ends_itself_when_nobody_waits_for_it(torch: Stage):
    torch.write("import signal, time; signal.pause()")
    argv = [sys.executable, "-m", "pytest_mlhpc.node.worker.probe", "1"]
    assert subprocess.run(argv, env=torch.environ, check=False, timeout=300).returncode == -14


@pytest.mark.servers
def test_the_real_torch_here_answers():
    argv = [sys.executable, "-m", "pytest_mlhpc.node.worker.probe", "100"]
    answer = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    assert answer["torch"]
    assert (Path(answer["file"]).exists(), answer["kind"] in {"", "cuda", "rocm", "xpu"}) == (True, True)


# --- what a system makes of it

GPU = "{scheduler: local, accelerator: auto}"


def systems(folder: Path, found: Accelerators, gpu: str = GPU):
    path = folder / "systems.yaml"
    path.write_text(f"systems: {{mine: {{partitions: {{cpu: {{scheduler: local}}, gpu: {gpu}}}}}}}\n")
    loaded = load_systems(path, schedulers={"local": None}, environ={})
    return dataclasses.replace(loaded, probe=lambda python, state_dir, environ: found)


NONE = Accelerators(reason="it has no device file")
TWO = Accelerators("cuda", ("NVIDIA H200",) * 2)


def test_auto_is_left_out_of_a_system_where_there_is_no_accelerator(tmp_path: Path):
    assert [target.partition.name for target in systems(tmp_path, NONE).select("mine")] == ["cpu"]


def test_auto_becomes_what_was_found(tmp_path: Path):
    cpu, gpu = systems(tmp_path, TWO).select("mine")
    nodes = gpu.partition.nodes
    assert (gpu.partition.accelerator, nodes.devices, nodes.device_model) == ("cuda", 2, "NVIDIA H200")
    assert gpu.fingerprint.endswith("_2-x-nvidia-h200")
    assert "h200" not in cpu.fingerprint


@pytest.mark.parametrize(
    ("found", "changed", "why"),
    [
        (NONE, "auto", r"'mine:gpu' cannot run here: .*no accelerator: it has no device file"),
        (TWO, "xpu", "this machine has cuda devices, not xpu"),
        (TWO, "auto, nodes: {devices: 3}", "this machine has 2 devices, not 3"),
        (NONE, "ipu", r"gpu\.nodes\.devices: is missing: how many ipu devices"),
    ],
    ids=["none", "another kind", "too few", "devices that torch cannot tell"],
)
def test_what_is_not_there_is_refused_by_name_with_the_reason(tmp_path: Path, found, changed, why):
    with pytest.raises(UsageError, match=why):
        systems(tmp_path, found, GPU.replace("auto", changed)).select("mine:gpu")


def test_torch_of_the_environment_that_was_asked_for_is_asked(tmp_path: Path):
    gpu = GPU.replace("auto", "auto, environments: {a: {python: /a/python}, b: {python: /b/python}}")
    probe = Mock(return_value=TWO)
    mine = dataclasses.replace(systems(tmp_path, TWO, gpu), probe=probe)
    for environment in (None, "b", "all"):
        mine.select("mine:gpu", environment)
    assert [call.args[0] for call in probe.call_args_list] == ["/a/python", "/b/python", "/a/python"]


def test_devices_that_torch_cannot_tell_may_be_said(tmp_path: Path):
    gpu = GPU.replace("auto", "ipu, nodes: {devices: 4, device_model: Mk2}")
    (target,) = systems(tmp_path, NONE, gpu).select("mine:gpu")
    assert (target.partition.accelerator, target.partition.nodes.devices) == ("ipu", 4)
