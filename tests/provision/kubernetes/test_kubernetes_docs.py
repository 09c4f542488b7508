"""docs/kubernetes.md says what is: its tables name every key, its examples render."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import manifest_schemas
import pytest
import yaml
from manifests import partition, workload

from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.provision.kubernetes import schema
from pytest_mlhpc.provision.kubernetes.kinds import builtin_kinds
from pytest_mlhpc.provision.kubernetes.kinds.custom import CustomKind
from pytest_mlhpc.provision.kubernetes.options import PATIENCE
from pytest_mlhpc.system.loading import load_systems
from pytest_mlhpc.system.previews import previews

PAGE = (Path(__file__).parents[3] / "docs/kubernetes.md").read_text(encoding="utf-8")


def table(heading: str) -> set[str]:
    """Return the words in the first cells of the table below *heading*."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {word for cell in cells for word in re.findall(r"`(\w+)", cell)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("## All keys under `kubernetes`", set(schema.KubernetesOptions.model_fields)),
        ("### Patience", set(PATIENCE)),
        ("### Kinds", set(builtin_kinds())),
        ("### A kind of your own", set(CustomKind.model_fields)),
        ("### Volumes", {"claim", "template", "empty_dir", "host_path", "config_map", "secret"}),
    ],
)
def test_a_table_names_every_key(heading: str, names: set[str]):
    assert table(heading) == names


def test_each_patience_of_the_file_has_a_default():
    assert set(schema.PatienceModel.model_fields) == set(PATIENCE)


EXAMPLES: list[dict[str, Any]] = [
    yaml.safe_load(block)["kubernetes"]
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    if block.startswith("kubernetes:")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_renders(example: dict[str, Any]):
    found = workload(partition(**example), 2)
    assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "pytest-mlhpc"
    assert len(EXAMPLES) >= 3


def test_what_a_test_may_say_is_an_option():
    (text,) = re.findall(r"kubernetes=(\{[^}]*\})\)", PAGE)
    schema.KubernetesOptions.model_validate(yaml.safe_load(text))


def test_the_entry_of_the_ten_minutes_renders(tmp_path: Path):
    (entry,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "mykube:" in block]
    (tmp_path / "systems.yaml").write_text(entry)
    hook = make_manager().hook
    schedulers = {name: model for each in hook.mlhpc_schedulers() for name, model in each.items()}
    shown = previews(load_systems(tmp_path / "systems.yaml", schedulers=schedulers, environ={}), hook)
    assert sorted(shown.found) == ["mykube.cpu.default", "mykube.gpu.default"]
    assert shown.notes == ()
    for preview in shown.found.values():
        for manifest in yaml.safe_load_all(preview.text):
            assert manifest_schemas.complaints(manifest) == []
