"""The templates as data: what can be seen without running them."""

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
