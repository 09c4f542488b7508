"""docs/systems.md and docs/kubernetes.md say what is: their entries load and render, and their lists name every key."""

import re

import manifest_schemas
import pytest
import yaml
from manifests import partition, workload
from systems_files import Page, previews_of

from pytest_mlhpc.provision import ssh
from pytest_mlhpc.provision.kubernetes import schema
from pytest_mlhpc.provision.kubernetes.schema import CustomKind
from pytest_mlhpc.provision.kubernetes.settings import PATIENCE, builtin_kinds
from pytest_mlhpc.provision.scheduler.definition import (
    JOB_NAMES,
    CommandsOptions,
    SchedulerDefinition,
    shipped,
)
from pytest_mlhpc.provision.scheduler.script import FAILED_STEPS
from pytest_mlhpc.provision.slurm import over_ssh
from pytest_mlhpc.provision.slurm.schema import SlurmOptions

SLURM, KUBERNETES, SSH = Page("systems.md"), Page("kubernetes.md"), Page("ssh.md")
COMMANDS = Page("scheduler-commands.md")


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        (SLURM, "### All keys under `slurm`", set(SlurmOptions.model_fields)),
        (COMMANDS, "## All keys under `commands`", set(CommandsOptions.model_fields)),
        (KUBERNETES, "## All keys under `kubernetes`", set(schema.KubernetesOptions.model_fields)),
        (KUBERNETES, "### Patience", set(PATIENCE)),
        (KUBERNETES, "### Kinds", set(builtin_kinds())),
        (KUBERNETES, "### Volumes", {"claim", "template", "empty_dir", "host_path", "config_map", "secret"}),
    ],
)
def test_a_list_names_every_key(page, heading, names):
    assert page.keys(heading) == names


def test_the_schema_describes_every_key_of_a_kind_of_ones_own():
    assert [name for name, field in CustomKind.model_fields.items() if not field.description] == []
    assert (
        "`CustomKind` in `pytest_mlhpc/provision/kubernetes/schema.py` describes each key" in KUBERNETES.text
    )


def test_each_patience_of_the_file_has_a_default():
    assert set(schema.PatienceModel.model_fields) == set(PATIENCE)


def test_every_exit_code_of_the_set_up_is_explained():
    explained = SLURM.text.partition("A set-up ends with an exit code")[2].partition("\n\nA job starts")[0]
    assert {int(code) for code in re.findall(r"\b7[0-9]\b", explained)} == set(FAILED_STEPS)


EXAMPLES = [
    yaml.safe_load(block)["kubernetes"] for block in KUBERNETES.examples() if block.startswith("kubernetes:")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_renders(example):
    labels = workload(partition(**example), 2)["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "pytest-mlhpc"
    assert len(EXAMPLES) >= 3


def test_what_a_test_may_say_is_an_option():
    (text,) = re.findall(r"kubernetes=(\{[^}]*\})\)", KUBERNETES.text)
    schema.KubernetesOptions.model_validate(yaml.safe_load(text))


def rendered_entry(page, name, folder, **environ):
    """Return the texts of both partitions of the system *name* of a page."""
    (entry,) = [block for block in page.examples() if f"{name}:" in block]
    (folder / "systems.yaml").write_text(entry)
    shown = previews_of(folder / "systems.yaml", **environ)
    assert (sorted(shown.found), shown.notes) == ([f"{name}.cpu.default", f"{name}.gpu.default"], ())
    return {partition: preview.text for partition, preview in shown.found.items()}


def test_the_entry_of_the_ten_minutes_with_slurm_renders_as_the_page_shows(tmp_path):
    scripts = rendered_entry(SLURM, "mycluster", tmp_path, MLHPC_ACCOUNT="z19")
    (shown,) = re.findall(r"--render mycluster:cpu\n(.*?)\.\.\.", SLURM.text, re.DOTALL)
    assert scripts["mycluster.cpu.default"].startswith(shown)


def test_the_entry_of_the_ten_minutes_with_kubernetes_renders(tmp_path):
    for text in rendered_entry(KUBERNETES, "mykube", tmp_path).values():
        for manifest in yaml.safe_load_all(text):
            assert manifest_schemas.complaints(manifest) == []


def test_the_entry_of_a_system_behind_ssh_loads_and_renders(tmp_path):
    (entry,) = SSH.examples()
    (tmp_path / "systems.yaml").write_text(entry)
    shown = previews_of(tmp_path / "systems.yaml")
    assert "--chdir=/work/ada/mlhpc/runs/" in shown.found["mycluster.cpu.default"].text


def test_the_entry_of_a_scheduler_by_commands_renders_as_the_page_shows(tmp_path):
    (entry,) = COMMANDS.examples()
    (shown,) = re.findall(r"```sh\n(.*?)```", COMMANDS.text, re.DOTALL)
    (tmp_path / "systems.yaml").write_text(entry)
    preview = previews_of(tmp_path / "systems.yaml").found["mycluster.all.default"]
    assert preview.text.startswith(shown)
    for words in (
        "#$ -l exclusive=true\n",
        "#$ -P proj\n",
        "node.batch.job_nodes --lines /work/ada/mlhpc/runs/",
    ):
        assert words in preview.text


def test_the_page_about_commands_names_each_definition_key_and_placeholder():
    cells = set(re.findall(r"^\| `([\w.]+)` \|", COMMANDS.text, re.MULTILINE))
    assert set(shipped()) <= cells
    assert set(SchedulerDefinition.model_fields) - {"title", "tested", "values"} <= cells
    assert set(JOB_NAMES) <= set(re.findall(r"`\{(\w+)\}`", COMMANDS.text))


def test_the_bounds_of_the_page_about_ssh_are_those_of_the_program():
    bounds = [over_ssh.SENT_BYTES, over_ssh.FETCHED_BYTES]
    assert [int(size) << 20 for size in re.findall(r"\| (\d+) MiB", SSH.text)] == bounds
    assert f"after {ssh.FIRST_PAUSE_S:g} s to a minute" in SSH.text
