"""docs/systems.md says what is: its entry loads and renders, and its table names every key."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.provision.slurm.schema import SlurmOptions
from pytest_mlhpc.provision.slurm.script import FAILED_STEPS
from pytest_mlhpc.system.loading import load_systems
from pytest_mlhpc.system.previews import previews

PAGE = (Path(__file__).parents[3] / "docs/systems.md").read_text(encoding="utf-8")


def test_the_entry_of_the_ten_minutes_renders(tmp_path: Path):
    (entry,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "mycluster:" in block]
    (tmp_path / "systems.yaml").write_text(entry)
    schedulers = {
        name: model for each in make_manager().hook.mlhpc_schedulers() for name, model in each.items()
    }
    systems = load_systems(tmp_path / "systems.yaml", schedulers=schedulers, environ={"MLHPC_ACCOUNT": "z19"})
    shown = previews(systems, make_manager().hook)
    scripts = {name: preview.text for name, preview in shown.found.items()}
    assert sorted(scripts) == ["mycluster.cpu.default", "mycluster.gpu.default"]
    assert shown.notes == ()
    shown = re.search(r"--render mycluster:cpu\n(.*?)\.\.\.", PAGE, re.DOTALL)
    assert shown is not None
    assert scripts["mycluster.cpu.default"].startswith(shown[1])


def test_the_table_names_every_key():
    section = PAGE.partition("### All keys under `slurm`")[2]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {word for cell in first_cells for word in re.findall(r"`(\w+)`", cell)}
    assert named == set(SlurmOptions.model_fields)


def test_every_exit_code_of_the_set_up_is_explained():
    table = PAGE.partition("| exit code |")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"\b7[0-9]\b", table)} == set(FAILED_STEPS)
