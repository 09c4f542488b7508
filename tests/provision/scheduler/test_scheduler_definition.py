"""Definitions of schedulers: those that are shipped, and what is wrong with one, with its file and line."""

import pytest
import yaml

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import ConfigError
from pytest_mlhpc.provision.scheduler.definition import SHIPPED, fill, read_definition, shipped

SHIPPED_TEXT = (SHIPPED / "gridengine.yaml").read_text(encoding="utf-8")
SYSTEMS = {
    "scheduler": "commands",
    "accelerator": "cpu",
    "nodes": {"cores": 2, "memory": "2GiB", "max": 2},
    "environments": {"default": {"python": "python3"}},
    "commands": {"definition": "gridengine"},
}


@pytest.fixture
def refused(tmp_path):
    """Return what is said of a systems file whose partition differs by this."""
    schedulers = {
        name: model for found in make_manager().hook.mlhpc_schedulers() for name, model in found.items()
    }

    def text(**changes):
        path = tmp_path / "systems.yaml"
        partition = {key: value for key, value in {**SYSTEMS, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump({"systems": {"s": {"partitions": {"p": partition}}}}))
        try:
            load_systems(path, schedulers=schedulers, environ={})
        except ConfigError as error:
            return str(error).replace(f"{tmp_path}/", "")
        return ""

    return text


@pytest.mark.parametrize("name", shipped())
def test_each_shipped_definition_is_valid_and_says_whether_it_was_tested(name):
    found = read_definition(SHIPPED / f"{name}.yaml", {})
    assert found.tested.startswith("8.1.9" if name == "gridengine" else "never; written from ")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("title: Grid Engine", "titel: Grid Engine", "own.yaml:LINE: titel: unknown key (did you mean 'title'?)"),
        ("cancel:\n", "cancels:\n", "own.yaml:LINE: cancels: unknown key (did you mean 'cancel'?)"),
        ('[qdel, "{id}"]', '[qdel, "{idd}"]', "own.yaml:LINE: cancel.argv: nothing gives '{idd}'; known: id, "),
        ("h_rt={time_limit_s}", "h_rt={limit}", "own.yaml:LINE: directives.arguments: nothing gives '{limit}'"),
        ("h_rt={time_limit_s}", "h_rt={time_limit_s", "has a brace that is none of a {name}"),
        ("(?P<id>\\d+)'", "(?P<id>\\d+'", "own.yaml:LINE: submit.id: "),
        ("(?P<id>\\d+)'", "\\d+'", "own.yaml:LINE: submit.id: the pattern has no group (?P<id>...)"),
        ("<state>(?P<state>\\w+)", "<state>(\\w+)", "own.yaml:LINE: query.job: the pattern has no group (?P<state>...)"),
        ("  file: PE_HOSTFILE\n", "", "say one of `file` and `variable`"),
        ('[qsub, -terse, -w, e, "{script}"]', "[]", "own.yaml:LINE: submit.argv: "),
        ('prefix: "#$"', "prefix:", "own.yaml:LINE: directives.prefix: "),
        (SHIPPED_TEXT, "", "own.yaml: is empty"),
        (SHIPPED_TEXT, "- a\n", "own.yaml:1: should be a mapping"),
        (SHIPPED_TEXT, "a: [", "this is not YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_definition_is_said_with_file_and_line(tmp_path, refused, old, new, problem):
    assert old in SHIPPED_TEXT
    (tmp_path / "own.yaml").write_text(SHIPPED_TEXT.replace(old, new))
    said = refused(commands={"definition": "own.yaml"})
    assert "the definition is wrong" in said
    line = SHIPPED_TEXT[: SHIPPED_TEXT.index(old)].count("\n") + 1
    assert problem.replace("LINE", str(line)) in said


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"commands": {"definition": "gridengin"}}, "is no definition; known: gridengine, lsf, pbspro, pjm, or the path"),
        ({"commands": {"definition": "there/is/none.yaml"}}, "none.yaml: cannot be read: No such file"),
        ({"commands": None}, "commands.definition: is missing"),
        ({"launcher": "srun"}, "srun starts ranks in jobs of Slurm alone, and this is Grid Engine"),
        ({"slurm": {"partition": "a"}}, "these are options of slurm, but the scheduler is commands"),
        ({"commands": {"definition": "gridengine", "qos": "a"}}, "commands.qos: unknown key"),
        ({"commands": {"definition": "gridengine", "values": {"slots": "{node}"}}}, "values.slots: nothing gives '{node}'"),
        ({"commands": {"definition": "gridengine", "values": {"quue": "all.q"}}}, "values.quue: no template of Grid Engine uses it; used: parallel_environment, queue, slots (did you mean 'queue'?)"),
        ({"commands": {"definition": "gridengine", "arguments": [["-P", "{p}"]]}}, "arguments: nothing gives '{p}'"),
        ({"commands": {"definition": "gridengine", "shared_directory": "work"}}, "is not an absolute path"),
        ({"transport": {"ssh": "me@there"}}, "only Slurm's commands are run by ssh"),
        ({"environments": {"e": {"container": {"image": "i", "runtime": "pyxis"}}}}, "pyxis is started by srun alone"),
    ],
)  # fmt: skip
def test_what_a_partition_cannot_have_is_said_with_its_line(refused, changes, problem):
    said = refused(**changes)
    assert problem in said
    assert said.startswith("systems.yaml:")


def test_a_valid_partition_is_accepted(refused):
    assert refused() == ""


def test_several_nodes_need_words_that_start_a_program_there(tmp_path, refused):
    text = SHIPPED_TEXT.replace('start: [qrsh, -inherit, -nostdin, -noshell, "{host}"]', "start: []")
    (tmp_path / "own.yaml").write_text(text)
    assert "nothing can be started on a second node" in refused(commands={"definition": "own.yaml"})


def test_a_value_is_put_in_once_and_never_read_again():
    assert fill("{a} {b}", {"a": "{b}", "b": "$(x)"}) == "{b} $(x)"
