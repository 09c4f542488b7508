"""systems.yaml as a whole: what it may say, and that every mistake is named with file, line, key and nearest word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.system.loading import find_systems_file, load_systems


class SlurmOptions(BaseModel):
    """Stands for the model of a scheduler that another package serves."""

    model_config = ConfigDict(extra="forbid")
    partition: str
    account: str | None = None
    exclusive: bool = False
    gpus: int = 0


HERE = Path(__file__).parent
MISTAKES = yaml.safe_load((HERE / "mistakes.yaml").read_text(encoding="utf-8"))
SCHEDULERS = {"local": None, "slurm": SlurmOptions}

CIRRUS = (HERE / "cirrus.yaml").read_text(encoding="utf-8")


def load(folder: Path, text: str, **environ: str):
    path = folder / "systems.yaml"
    path.write_text(text)
    return load_systems(path, schedulers=SCHEDULERS, launchers={"plain", "torchrun", "srun"}, environ=environ)


def refused(folder: Path, text: str) -> list[str]:
    """Return the problems without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def partition(**keys: str) -> str:
    """Return a file with a local partition; the keys start in line 5."""
    lines = "".join(f"        {key}: {value}\n" for key, value in keys.items())
    return f"systems:\n  mine:\n    partitions:\n      cpu:\n{lines}"


# --- what it becomes


def test_the_documented_example_becomes_a_target(tmp_path: Path):
    (target,) = load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z19").select("cirrus")
    part = target.partition
    assert (part.id, part.launcher) == ("cirrus:standard", "srun")
    assert (part.time_limit_s, part.budget) == (5400, "20 node-hours")
    assert (part.nodes.cores, part.nodes.memory, part.nodes.max) == (288, 768 * 2**30, 128)
    account = {"partition": "standard", "account": "z19"}
    assert part.scheduler_options == {**account, "exclusive": True, "gpus": 0}
    assert target.environment.variables == {"OMP_NUM_THREADS": "{cores_per_rank}"}
    assert target.environment.modules == ("cray-python",)
    assert target.datasets["cosmoflow"].files == 524288
    assert target.fingerprint == ""


def test_the_first_environment_is_taken_unless_told_otherwise(tmp_path: Path):
    systems = load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z19")
    assert [target.id for target in systems.select("cirrus")] == ["cirrus:standard+default"]
    assert [target.id for target in systems.select("cirrus", "other")] == ["cirrus:standard+other"]
    assert [target.id for target in systems.select("cirrus:standard", "all")] == [
        "cirrus:standard+default",
        "cirrus:standard+other",
    ]


def test_a_local_partition_reads_what_it_is_not_told(tmp_path: Path):
    (target,) = load(tmp_path, partition(scheduler="local")).select("mine")
    assert target.partition.nodes.cores >= 1
    assert target.partition.nodes.memory > 2**20
    assert target.partition.launcher == "auto"
    assert (target.environment.name, target.environment.python) == ("default", sys.executable)
    assert f"{target.partition.nodes.cores}-cores" in target.fingerprint


def test_relative_paths_are_relative_to_the_file(tmp_path: Path):
    text = partition(scheduler="local", environments="{venv: {python: venv/bin/python}}")
    text += "    datasets: {c: {path: data/c, kind: real}}\n"
    (target,) = load(tmp_path, text).select("mine")
    assert target.environment.python == str(tmp_path / "venv/bin/python")
    assert target.datasets["c"].path == str(tmp_path / "data/c")


def test_defaults_hold_for_every_partition_and_the_partition_wins(tmp_path: Path):
    text = (
        "defaults: {max_jobs: 2, preset: small, slurm: {partition: x}}\n"
        "systems: {mine: {partitions: {a: {scheduler: local}, b: {scheduler: local, max_jobs: 3}}}}\n"
    )
    first, second = load(tmp_path, text).select("mine")
    assert (first.partition.max_jobs, first.partition.preset) == (2, "small")
    assert (second.partition.max_jobs, second.partition.preset) == (3, "small")


def test_an_environment_of_the_partition_comes_before_those_of_defaults(tmp_path: Path):
    text = (
        "defaults: {environments: {shared: {}}}\n"
        "systems: {mine: {partitions: {a: {scheduler: local, environments: {own: {}}}}}}\n"
    )
    (target,) = load(tmp_path, text).select("mine")
    assert target.environment.name == "own"


def test_included_files_bring_systems_and_take_defaults(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.yaml").write_text("systems: {b: {partitions: {p: {scheduler: local}}}}\n")
    systems = load(tmp_path, "include: [sub/b.yaml]\ndefaults: {max_jobs: 7}\n")
    (target,) = systems.select("b:p")
    assert target.partition.max_jobs == 7


def test_an_escaped_variable_reaches_the_run_as_text(tmp_path: Path):
    from pytest_mlhpc.system.interpolate import fill

    text = partition(scheduler="local", environments="{d: {variables: {A: '$${HOME}/{cores}', B: '${X}'}}}")
    (target,) = load(tmp_path, text, X="{cores}").select("mine")
    filled = {name: fill(value, {"cores": 4}) for name, value in target.environment.variables.items()}
    assert filled == {"A": "${HOME}/4", "B": "{cores}"}


def test_a_container_may_be_just_its_image(tmp_path: Path):
    text = partition(scheduler="local", environments="{d: {container: /images/torch.sif}}")
    (target,) = load(tmp_path, text).select("mine")
    assert target.environment.extra == {"container": {"image": "/images/torch.sif", "mounts": []}}


# --- where it is found


def test_the_option_comes_before_the_folder_and_the_folder_before_the_built_in(tmp_path: Path):
    assert find_systems_file(tmp_path, None).name == "builtin.yaml"
    (tmp_path / "systems.yaml").write_text("")
    assert find_systems_file(tmp_path, None) == tmp_path / "systems.yaml"
    (tmp_path / "x.yaml").write_text("")
    assert find_systems_file(tmp_path, str(tmp_path / "x.yaml")) == tmp_path / "x.yaml"


def test_a_file_that_is_asked_for_and_missing_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--systems-file .*there is no such file"):
        find_systems_file(tmp_path, str(tmp_path / "x.yaml"))


def test_the_built_in_file_has_this_machine(tmp_path: Path):
    path = find_systems_file(tmp_path, None)
    systems = load_systems(path, schedulers={"local": None}, environ={})
    assert "local:cpu" in [target.partition.id for target in systems.select("local")]


def test_the_projects_own_file_is_valid():
    path = Path(__file__).parents[2] / "systems.yaml"
    schedulers = {
        name: model for each in make_manager().hook.mlhpc_schedulers() for name, model in each.items()
    }
    assert {"local", "testcluster"} <= set(load_systems(path, schedulers=schedulers, environ={}).entries)


def test_the_shell_of_setup_stays_as_it_was_written(tmp_path: Path):
    text = CIRRUS.replace(
        "default: {modules", 'default: {setup: "export HOME=${HOME/home/work} # {x} $${", modules'
    )
    (target,) = load(tmp_path, text, MLHPC_ACCOUNT="x").select("cirrus")
    assert target.environment.extra["setup"] == "export HOME=${HOME/home/work} # {x} $${"


def test_loading_this_module_needs_pydantic_but_the_model_does_not():
    code = "import sys, pytest_mlhpc.system.model, pytest_mlhpc.system.cli; print('pydantic' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# --- selection


@pytest.mark.parametrize(
    ("name", "environment", "text"),
    [
        ("cirus", None, r"unknown system 'cirus' \(did you mean 'cirrus'\?\)"),
        ("cirrus", "defalt", r"unknown environment 'defalt' \(did you mean 'default'\?\)"),
        *(
            (f"cirrus:{name}", None, "unknown partition .*known: standard")
            for name in ("standrad", "", "standard:x")
        ),
        *(
            (name, None, "unknown (system|partition)")
            for name in ("", ":", "../cirrus", "cirrus;id", "cirrus\n")
        ),
        ("x" * 10_000, None, "unknown system"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(tmp_path: Path, name, environment, text):
    with pytest.raises(UsageError, match=text):
        load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z").select(name, environment)


def test_an_unknown_system_names_a_file_in_this_folder_that_was_not_read(tmp_path: Path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "systems.yaml").write_text("schema: 1\nsystems: {}\n")
    monkeypatch.chdir(here)
    with pytest.raises(
        UsageError, match=r"systems.yaml was not read: --systems-file=\S+here/systems.yaml does that"
    ):
        load(tmp_path, CIRRUS).select("mine")


def test_an_archived_system_is_refused_by_name_and_still_shown(tmp_path: Path):
    text = CIRRUS.replace(
        "    partitions:", "    status: archived\n    as_of: 2025-12-08\n    partitions:", 1
    )
    text = text.replace("scheduler: slurm", "scheduler: lsf").replace("slurm: {", "lsf: {")
    systems = load(tmp_path, text)
    with pytest.raises(UsageError, match=r"'cirrus' is archived \(facts as of 2025-12-08\)"):
        systems.select("cirrus")
    system, _ = systems.system("cirrus", display=True)
    assert (system.status, system.partitions[0].scheduler) == ("archived", "lsf")


def test_a_missing_variable_is_a_problem_of_the_selected_partition_only(tmp_path: Path):
    text = CIRRUS + "  mine: {partitions: {cpu: {scheduler: local}}}\n"
    systems = load(tmp_path, text, MLHPC_ACOUNT="z19")
    assert len(systems.select("mine")) == 1
    with pytest.raises(ConfigError) as caught:
        systems.select("cirrus")
    (problem,) = caught.value.problems
    assert str(problem) == (
        f"{tmp_path}/systems.yaml:10: systems.cirrus.partitions.standard.slurm.account: "
        "the environment variable MLHPC_ACCOUNT is not set (did you mean 'MLHPC_ACOUNT'?)"
    )


def test_a_value_from_a_variable_is_validated_once_it_is_known(tmp_path: Path):
    text = CIRRUS.replace("cores: 288", 'cores: "${CORES}"')
    assert load(tmp_path, text, MLHPC_ACCOUNT="z", CORES="64").select("cirrus")[0].partition.nodes.cores == 64
    with pytest.raises(
        ConfigError,
        match=r"systems.yaml:9: .*nodes.cores: should be a whole number, not the value of '\$\{CORES\}'",
    ):
        load(tmp_path, text, MLHPC_ACCOUNT="z", CORES="many").select("cirrus")


def test_a_local_partition_cannot_have_more_than_the_machine(tmp_path: Path):
    text = partition(scheduler="local", nodes="{cores: 100000, memory: 900PiB}")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text).select("mine")
    assert [problem.key.rpartition(".")[2] for problem in caught.value.problems] == ["cores", "memory"]
    assert "100,000 is more than this machine has" in str(caught.value)


def test_what_is_shown_holds_no_secret(tmp_path: Path):
    text = partition(scheduler="local", environments="{d: {variables: {KEY: '${KEY}'}}}")
    systems = load(tmp_path, text, KEY="hunter2")
    system, _ = systems.system("mine", display=True)
    assert "hunter2" not in repr(system)
    assert "hunter2" not in repr(systems)
    assert systems.select("mine")[0].environment.variables == {"KEY": "hunter2"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "'${KEY}'") for key in ("time_limit", "accelerator", "preset", "budget")),
        ("nodes", "{memory: '${KEY}'}"),
        ("nodes", "{cores: 'x${KEY}'}"),
        ("environments", "{d: {modules: ['${KEY}']}}"),
        ("features", "['${KEY}']"),
    ],
)
def test_no_message_repeats_what_a_variable_holds(tmp_path: Path, key, value):
    for secret in ("hunter2 of 1978!", "hunter2\n" * 50):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, partition(scheduler="local", **{key: value}), KEY=secret).select("mine")
        assert "hunter2" not in str(caught.value)
        assert "${KEY}" in str(caught.value)


def test_only_an_environments_variables_are_templates(tmp_path: Path):
    environments = "{variables: {variables: {A: '{{{cores}}}'}, python: '/{x}'}}"
    (target,) = load(tmp_path, partition(scheduler="local", environments=environments)).select("mine")
    assert target.environment.python == "/{x}"
    assert target.environment.variables == {"A": "{{{cores}}}"}


def test_included_files_have_a_limit(tmp_path: Path):
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"include: [{number + 1}.yaml]\n")
    assert "more than 50 included files" in refused(tmp_path, "include: [0.yaml]\n")[0]


# --- bad input


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["problems"][0] for mistake in MISTAKES])
def test_all_mistakes_are_named_with_line_key_and_nearest_word(tmp_path: Path, mistake):
    for name, content in mistake.get("files", {}).items():
        (tmp_path / name).write_text(content)
    text = CIRRUS if "example" in mistake else mistake.get("file") or partition(**mistake["partition"])
    for old, new in mistake.get("example", {}).items():
        text = text.replace(old, new)
    assert refused(tmp_path, text) == mistake["problems"]


@pytest.mark.parametrize(
    "name",
    [
        '"a\\nb"',
        "'a*'",
        "x" * 65,
        *["a;rm -rf", "$(id)", "`id`", "a|b", "a>b", "a&b", "../a", "a/b", "..", "a b", "-a", "a:b", "é"],
    ],
)
def test_names_that_could_do_harm_are_refused(tmp_path: Path, name):
    key = name if name.startswith(('"', "'")) else f'"{name}"'
    for text in (
        f"systems: {{{key}: {{partitions: {{p: {{scheduler: local}}}}}}}}\n",
        f"systems: {{s: {{partitions: {{{key}: {{scheduler: local}}}}}}}}\n",
        f"systems: {{s: {{partitions: {{p: {{scheduler: local, environments: {{{key}: {{}}}}}}}}}}}}\n",
        f"systems: {{s: {{partitions: {{p: {{scheduler: local}}}}, datasets: {{{key}: {{path: /x, kind: real}}}}}}}}\n",
    ):
        problems = refused(tmp_path, text)
        assert all(problem.startswith("systems.yaml:1: ") for problem in problems)
        assert any("is not a name" in problem or "control character" in problem for problem in problems)


@pytest.mark.parametrize("module", ["../x", "a b", "x; id", "$(id)", "-x", "a\n"])
def test_modules_that_could_do_harm_are_refused(tmp_path: Path, module):
    text = partition(scheduler="local", environments=f"{{d: {{modules: [{module!r}]}}}}")
    assert any(
        "is not a module" in problem for problem in refused(tmp_path, text.replace("'a\\n'", '"a\\n"'))
    )


def test_an_include_that_no_file_can_have_is_named(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    problems = refused(tmp_path, f"include: [loop, {'x' * 3000}, systems.yaml/x]\n")
    assert [problem.split(": ")[1] for problem in problems] == ["include[0]", "include[1]", "include[2]"]


def test_an_option_that_no_file_can_have_is_a_usage_error(tmp_path: Path):
    for name in ("x" * 5000, "nul\0", str(tmp_path / "no/such")):
        with pytest.raises(UsageError, match="there is no such file"):
            find_systems_file(tmp_path, name)


def test_a_circle_through_a_symbolic_link_is_seen(tmp_path: Path):
    (tmp_path / "link.yaml").symlink_to(tmp_path / "systems.yaml")
    assert "circle" in refused(tmp_path, "include: [link.yaml]\n")[0]


def test_problems_of_all_files_are_named_at_once(tmp_path: Path):
    (tmp_path / "b.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "c.yaml").write_bytes(b"\xff")
    problems = refused(tmp_path, "include: [b.yaml, c.yaml, systems.yaml]\nsystemz: {}\n")
    assert [problem.split(":")[0] for problem in problems] == [
        "b.yaml",
        "c.yaml",
        "systems.yaml",
        "systems.yaml",
    ]


def test_defaults_times_partitions_cannot_explode(tmp_path: Path):
    defaults = ", ".join(f"k{number}: 1" for number in range(4000))
    partitions = ", ".join(f"p{number}: {{scheduler: local}}" for number in range(2000))
    text = f"defaults: {{{defaults}}}\nsystems: {{s: {{partitions: {{{partitions}}}}}}}\n"
    assert "values with defaults written out" in refused(tmp_path, text)[0]


_MUTATION = st.tuples(
    st.integers(0, len(CIRRUS) - 1),
    st.integers(0, 12),
    st.sampled_from(["", "[]", "null", "- ", "&a ", "*a", "${", "{cores}", "true", "1e9", *"x:{}'\n\t "]),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_MUTATION, min_size=1, max_size=3))
def test_any_mutated_file_gives_systems_or_a_usage_error(tmp_path: Path, mutations):
    text = CIRRUS
    for start, length, new in mutations:
        text = text[:start] + new + text[start + length :]
    try:
        targets = load(tmp_path, text, MLHPC_ACCOUNT="z").select("cirrus", "all")
    except UsageError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert targets


_WORDS = st.sampled_from(
    [
        "",
        "a b",
        *[
            "scheduler",
            "local",
            "slurm",
            "defaults",
            "variables",
            "${X}",
            "${",
            "{cores}",
            "{",
            "auto",
            "status",
            "archived",
        ],
    ]
)
_JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 2**70), st.floats(), _WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_WORDS, inner, max_size=2)),
    max_leaves=6,
)


def paths_of(value, path=()):
    """Yield where every value of a parsed file is."""
    yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in entries:
        yield from paths_of(child, (*path, key))


_PATHS = sorted((path for path in paths_of(yaml.safe_load(CIRRUS)) if path), key=str)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(_PATHS), _JUNK, st.none() | _WORDS)
def test_any_value_in_any_place_gives_systems_or_a_usage_error(tmp_path: Path, path, junk, new_key):
    data = yaml.safe_load(CIRRUS)
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = junk
    if new_key is not None and isinstance(place, dict):
        place[new_key] = junk
    try:
        systems = load(tmp_path, yaml.safe_dump(data), MLHPC_ACCOUNT="z", X="a\nb{")
        targets = systems.select("cirrus", "all")
    except UsageError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert targets
        assert systems.system("cirrus", display=True)


def test_the_example_of_the_documentation_is_valid(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs/systems.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/alps.yaml").write_text("systems: {alps: {partitions: {p: {scheduler: local}}}}\n")
    systems = load(tmp_path, text, SCRATCH="/scratch")
    first, second = systems.select("workstation:cpu", "all")
    assert first.partition.max_jobs == 4
    assert second.environment.variables["HF_HOME"] == "/scratch/hf"
