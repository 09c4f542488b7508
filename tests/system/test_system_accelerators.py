"""A look into /dev, and only if something is there a process that asks torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.system import accelerators
from pytest_mlhpc.system.accelerators import Accelerators, device_files, find_accelerators
from pytest_mlhpc.system.loading import load_systems

TORCH = """\
import os
open(os.environ["CALLS"], "a").write("x")
from torch import version
__version__ = "9.9"
class cuda:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda index: "NVIDIA H200")
    def init():
        raise RuntimeError("Found no NVIDIA driver on your system.\\nPlease check that you have a GPU")
"""


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """Return a /dev with an accelerator's device file."""
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "nvidia0").touch()
    return folder


class Stage:
    """An interpreter's torch, made of a few lines, that counts how often it is imported."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "site/torch"
        self.package.mkdir(parents=True)
        self.calls = folder / "calls"
        self.environ = {**os.environ, "PYTHONPATH": str(folder / "site"), "CALLS": str(self.calls)}

    def write(self, text: str, version: str = "hip = None\n") -> None:
        (self.package / "__init__.py").write_text(text)
        (self.package / "version.py").write_text(version)

    @property
    def imports(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0


@pytest.fixture
def torch(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.write(TORCH.format(available=True))
    return stage


def test_only_files_of_accelerators_count(tmp_path: Path):
    for name in ("nvidiactl", "tty", "nvidia-uvm", "kfd", "dri/card0", "dri/renderD128", "nvidia10"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(Path(path).relative_to(tmp_path)) for path in device_files(tmp_path)]
    assert names == ["dri/renderD128", "kfd", "nvidia10"]


def test_without_a_device_file_nothing_is_started(tmp_path: Path, torch: Stage):
    found = find_accelerators(sys.executable, tmp_path / "state", torch.environ, dev=tmp_path)
    assert "no device file" in found.reason
    assert torch.imports == 0
    assert not (tmp_path / "state").exists()


def test_what_torch_sees_is_found_and_asked_once_per_boot(tmp_path: Path, dev: Path, torch: Stage):
    state = tmp_path / "state"
    first = find_accelerators(sys.executable, state, torch.environ, dev=dev)
    second = find_accelerators(sys.executable, state, torch.environ, dev=dev)
    assert first == second == Accelerators("cuda", ("NVIDIA H200", "NVIDIA H200"))
    assert first.model == "NVIDIA H200"
    assert torch.imports == 1


def test_a_driver_that_was_mended_is_seen_in_the_same_boot(tmp_path: Path, dev: Path, torch: Stage):
    torch.write(TORCH.format(available="os.path.exists(os.environ['CALLS'] + '.mended')"))
    broken = find_accelerators(sys.executable, tmp_path / "state", torch.environ, dev=dev)
    assert broken.kind == ""
    assert broken.reason.endswith("sees no accelerator: Found no NVIDIA driver on your system.")

    Path(f"{torch.calls}.mended").touch()
    assert find_accelerators(sys.executable, tmp_path / "state", torch.environ, dev=dev).kind == "cuda"


def test_another_torch_is_asked_again(tmp_path: Path, dev: Path, torch: Stage):
    state = tmp_path / "state"
    find_accelerators(sys.executable, state, torch.environ, dev=dev)
    torch.write(TORCH.format(available=False))
    os.utime(torch.package / "version.py", ns=(1, 1))
    found = find_accelerators(sys.executable, state, torch.environ, dev=dev)
    assert (found.kind, torch.imports) == ("", 2)
    assert "torch 9.9" in found.reason
    assert "sees no accelerator" in found.reason


def test_other_visible_devices_are_another_question(tmp_path: Path, dev: Path, torch: Stage):
    state = tmp_path / "state"
    find_accelerators(sys.executable, state, torch.environ, dev=dev)
    find_accelerators(sys.executable, state, {**torch.environ, "CUDA_VISIBLE_DEVICES": "1"}, dev=dev)
    assert torch.imports == 2


def test_a_damaged_answer_is_asked_again(tmp_path: Path, dev: Path, torch: Stage):
    state = tmp_path / "state"
    find_accelerators(sys.executable, state, torch.environ, dev=dev)
    for path in (state / "cache").iterdir():
        path.write_text('{"found": 3')
    assert find_accelerators(sys.executable, state, torch.environ, dev=dev).kind == "cuda"


def test_a_state_directory_that_cannot_be_written_is_no_hindrance(tmp_path: Path, dev: Path, torch: Stage):
    (tmp_path / "file").touch()
    assert find_accelerators(sys.executable, tmp_path / "file/x", torch.environ, dev=dev).kind == "cuda"


def test_a_rocm_build_is_told_from_cuda(tmp_path: Path, dev: Path, torch: Stage):
    torch.write(TORCH.format(available=True), version="hip = '6.2'\n")
    assert find_accelerators(sys.executable, None, torch.environ, dev=dev).kind == "rocm"


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
def test_a_broken_torch_is_an_answer(tmp_path: Path, dev: Path, torch: Stage, text, reason):
    torch.write(text)
    found = find_accelerators(sys.executable, tmp_path / "state", torch.environ, dev=dev)
    assert reason in found.reason
    assert found.kind == ""


def test_an_interpreter_that_does_not_exist_is_named(dev: Path):
    found = find_accelerators("/nowhere/python", None, {}, dev=dev)
    assert found.reason == "'/nowhere/python' cannot be started to ask torch: No such file or directory"


@pytest.mark.servers
def test_a_driver_that_hangs_is_given_up(monkeypatch, dev: Path, torch: Stage):
    monkeypatch.setattr(accelerators, "PROBE_LIMIT_S", 1)
    torch.write("import time; time.sleep(6000)")
    found = find_accelerators(sys.executable, None, torch.environ, dev=dev)
    assert "did not answer within 1 s" in found.reason


@pytest.mark.servers
def test_the_probe_ends_itself_when_nobody_waits_for_it(torch: Stage):
    torch.write("import signal, time; signal.pause()")
    argv = [sys.executable, "-m", "pytest_mlhpc.worker.probe", "1"]
    run = subprocess.run(argv, env=torch.environ, check=False, timeout=300)
    assert run.returncode == -14


@pytest.mark.servers
def test_the_real_torch_here_answers():
    argv = [sys.executable, "-m", "pytest_mlhpc.worker.probe", "100"]
    answer = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    assert answer["torch"]
    assert Path(answer["file"]).exists()
    assert answer["kind"] in {"", "cuda", "rocm", "xpu"}


# --- what a system makes of it

TEXT = """\
systems:
  mine:
    partitions:
      cpu: {scheduler: local}
      gpu: {scheduler: local, accelerator: auto}
"""


def systems(folder: Path, found: Accelerators, text: str = TEXT):
    path = folder / "systems.yaml"
    path.write_text(text)
    loaded = load_systems(path, schedulers={"local": None}, environ={})
    return dataclasses.replace(loaded, probe=lambda python, state_dir, environ: found)


NONE = Accelerators(reason="it has no device file")
TWO = Accelerators("cuda", ("NVIDIA H200",) * 2)


def test_auto_is_left_out_of_a_system_where_there_is_no_accelerator(tmp_path: Path):
    assert [target.partition.name for target in systems(tmp_path, NONE).select("mine")] == ["cpu"]


def test_auto_by_name_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(
        UsageError, match=r"'mine:gpu' cannot run here: .*no accelerator: it has no device file"
    ):
        systems(tmp_path, NONE).select("mine:gpu")


def test_auto_becomes_what_was_found(tmp_path: Path):
    cpu, gpu = systems(tmp_path, TWO).select("mine")
    assert (gpu.partition.accelerator, gpu.partition.nodes.devices) == ("cuda", 2)
    assert gpu.partition.nodes.device_model == "NVIDIA H200"
    assert gpu.fingerprint.endswith("_2-x-nvidia-h200")
    assert "h200" not in cpu.fingerprint


def test_a_local_partition_of_another_kind_is_not_live(tmp_path: Path):
    text = TEXT.replace("auto", "xpu")
    with pytest.raises(UsageError, match="this machine has cuda devices, not xpu"):
        systems(tmp_path, TWO, text).select("mine:gpu")


def test_more_devices_than_there_are_is_not_live(tmp_path: Path):
    text = TEXT.replace("auto", "auto, nodes: {devices: 3}")
    with pytest.raises(UsageError, match="this machine has 2 devices, not 3"):
        systems(tmp_path, TWO, text).select("mine:gpu")


def test_torch_of_the_environment_that_was_asked_for_is_asked(tmp_path: Path):
    text = TEXT.replace("auto", "auto, environments: {a: {python: /a/python}, b: {python: /b/python}}")
    asked = []
    mine = systems(tmp_path, TWO, text)
    mine = dataclasses.replace(mine, probe=lambda python, state_dir, environ: asked.append(python) or TWO)
    for environment in (None, "b", "all"):
        mine.select("mine:gpu", environment)
    assert asked == ["/a/python", "/b/python", "/a/python"]


def test_devices_that_torch_cannot_tell_must_be_said(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gpu\.nodes\.devices: is missing: how many ipu devices"):
        systems(tmp_path, NONE, TEXT.replace("auto", "ipu"))
    text = TEXT.replace("auto", "ipu, nodes: {devices: 4, device_model: Mk2}")
    (target,) = systems(tmp_path, NONE, text).select("mine:gpu")
    assert (target.partition.accelerator, target.partition.nodes.devices) == ("ipu", 4)
