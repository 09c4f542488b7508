"""The templates as data: what can be seen without running them."""

import re
import shutil
import subprocess

import pytest
import yaml
from services import ROOT

from pytest_mlhpc.ci.pipelines import Inputs

FILES = sorted([*(ROOT / "ci/gitlab").rglob("*.yml"), *(ROOT / "ci/github").glob("*.yml")])


def inputs_of(name):
    header, _jobs = yaml.safe_load_all((ROOT / f"ci/gitlab/templates/{name}.yml").read_text(encoding="utf-8"))
    return dict(header["spec"]["inputs"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_yaml(path):
    assert list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def test_mlhpc_ci_yaml_takes_each_input_of_the_template_and_no_other():
    assert {"system", *Inputs.model_fields} == set(inputs_of("bench"))


@pytest.mark.parametrize("name", ["bench", "publish"])
def test_each_input_is_used_and_each_that_is_used_is_there(name):
    text = (ROOT / f"ci/gitlab/templates/{name}.yml").read_text(encoding="utf-8").partition("\n---\n")[2]
    used = {word.partition(" ]]")[0] for word in text.split("$[[ inputs.")[1:]}
    assert used == set(inputs_of(name))


@pytest.mark.parametrize("name", ["example", "example.children"])
def test_examples_give_what_templates_ask_for(name):
    content = yaml.safe_load((ROOT / f"ci/gitlab/{name}.gitlab-ci.yml").read_text(encoding="utf-8"))
    for include in content["include"]:
        known = inputs_of(include["local"].rpartition("/")[2].removesuffix(".yml"))
        needed = {key for key, value in known.items() if "default" not in value}
        assert needed <= set(include["inputs"]) <= set(known)


# --- the catalogue


def rows_of(name):
    """Return the table of a component in the README: input -> default and meaning."""
    text = (ROOT / "ci/gitlab/README.md").read_text(encoding="utf-8").partition(f"\n## {name}\n")[2]
    found = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
    return {key: (default, meaning) for key, default, meaning in found}


def written(default):
    """Return a default as the README has it."""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else ""


@pytest.mark.parametrize("name", ["bench", "publish"])
def test_the_readme_of_the_catalogue_explains_each_input_as_its_component_does(name):
    known = {
        key: (
            written(one["default"]) if "default" in one else "needed",
            one["description"] + (f" ({', '.join(one['options'])})" if "options" in one else ""),
        )
        for key, one in inputs_of(name).items()
    }
    assert rows_of(name) == known


def test_the_readme_of_the_catalogue_gives_each_component_what_it_asks_for():
    block = re.search(
        r"```yaml\n(.*?)```", (ROOT / "ci/gitlab/README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    includes = yaml.safe_load(block[1])["include"]
    names = [one["component"].rpartition("/")[2].partition("@")[0] for one in includes]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "ci/gitlab/templates").iterdir())
    for name, one in zip(names, includes, strict=True):
        known = inputs_of(name)
        needed = {key for key, value in known.items() if "default" not in value}
        assert needed <= set(one["inputs"]) <= set(known)


def test_a_catalogue_project_is_split_off_with_its_layout_at_the_root(tmp_path):
    (command,) = re.findall(r"^\$ (git subtree .*)$", (ROOT / "docs/gitlab.md").read_text(), re.MULTILINE)
    shutil.copytree(ROOT / "ci/gitlab", tmp_path / "ci/gitlab")

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        ).stdout

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "-m", "all")
    git(*command.split()[1:])
    found = set(git("ls-tree", "-r", "--name-only", "components").split())
    assert {"README.md", ".gitlab-ci.yml", "templates/bench.yml", "templates/publish.yml"} <= found
