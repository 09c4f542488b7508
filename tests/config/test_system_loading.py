"""systems.yaml as a whole: what it may say, and that every mistake is named with file, line, key and nearest word."""

import json
import subprocess
import sys
from collections import ChainMap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from odd_values import odd, paths_of
from pydantic import BaseModel, ConfigDict

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.config.systems_files import find_systems_file
from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions


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


def test_the_maintenance_of_a_system_is_that_of_each_partition_that_names_none(tmp_path):
    systems = load(
        tmp_path,
        "systems:\n  mine:\n    maintenance: [{from: 2026-12-24, until: 2026-12-25T06:00+01:00, reason: pumps}]\n"
        "    partitions:\n      cpu: {scheduler: local}\n"
        "      gpu: {scheduler: local, maintenance: [{from: 2026-12-26, until: 2026-12-27, reason: fans}]}\n",
    )
    found = [(system, part, one.reason) for system, part, one in systems.maintenances()]
    assert found == [("mine", "cpu", "pumps"), ("mine", "gpu", "fans")]
    (target,) = systems.select("mine:cpu")
    (window,) = target.partition.maintenance
    assert (window.end_ns - window.start_ns, window.start_ns) == (29 * 3600 * 10**9, 1_798_070_400 * 10**9)


def test_the_documented_example_becomes_a_target(tmp_path: Path):
    (target,) = load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z19").select("cirrus")
    part, environment = target.partition, target.environment
    options = {"partition": "standard", "account": "z19", "exclusive": True, "gpus": 0}
    assert (part.id, part.launcher, part.scheduler_options) == ("cirrus:standard", "srun", options)
    assert (part.time_limit_s, part.budget) == (5400, "20 node-hours")
    assert (part.nodes.cores, part.nodes.memory, part.nodes.max) == (288, 768 * 2**30, 128)
    assert environment.variables == {"OMP_NUM_THREADS": "{cores_per_rank}"}
    assert environment.modules == ("cray-python",)
    assert (target.datasets["cosmoflow"].files, target.fingerprint) == (524288, "")


@pytest.mark.parametrize(
    ("name", "environment", "chosen"),
    [
        ("cirrus", None, ["default"]),
        ("cirrus", "other", ["other"]),
        ("cirrus:standard", "all", ["default", "other"]),
    ],
)
def test_the_first_environment_is_taken_unless_stated_otherwise(tmp_path: Path, name, environment, chosen):
    targets = load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z19").select(name, environment)
    assert [target.id for target in targets] == [f"cirrus:standard+{one}" for one in chosen]


def test_a_local_partition_reads_what_its_entry_does_not_say(tmp_path: Path):
    (target,) = load(tmp_path, partition(scheduler="local")).select("mine")
    nodes, environment = target.partition.nodes, target.environment
    assert nodes.cores >= 1
    assert nodes.memory > 2**20
    assert (target.partition.launcher, environment.name, environment.python) == (
        "auto",
        "default",
        sys.executable,
    )
    assert f"{nodes.cores}-cores" in target.fingerprint


def test_relative_paths_are_relative_to_the_file(tmp_path: Path):
    text = partition(scheduler="local", environments="{venv: {python: venv/bin/python}}")
    (target,) = load(tmp_path, text + "    datasets: {c: {path: data/c, kind: real}}\n").select("mine")
    paths = target.environment.python, target.datasets["c"].path
    assert paths == (str(tmp_path / "venv/bin/python"), str(tmp_path / "data/c"))


def test_defaults_hold_for_every_partition_and_the_partition_wins(tmp_path: Path):
    text = (
        "defaults: {max_jobs: 2, preset: small, environments: {shared: {}}, slurm: {partition: x}}\n"
        "systems: {mine: {partitions: {a: {scheduler: local}, b: {scheduler: local, max_jobs: 3, environments: {own: {}}}}}}\n"
    )
    found = load(tmp_path, text).select("mine")
    assert [(one.partition.max_jobs, one.partition.preset) for one in found] == [(2, "small"), (3, "small")]
    assert [one.environment.name for one in found] == ["shared", "own"]


def test_what_matters_is_said_for_a_partition_or_by_the_defaults_for_the_site(tmp_path: Path):
    text = (
        "defaults: {matters: 3 %}\n"
        "systems: {mine: {partitions: {a: {scheduler: local}, b: {scheduler: local, matters: 0.5%}}}}\n"
    )
    assert [one.partition.matters for one in load(tmp_path, text).select("mine")] == [0.03, 0.005]
    with pytest.raises(ConfigError, match="write it like '3 %'"):
        load(tmp_path, text.replace("3 %", "0.03")).select("mine")


@pytest.mark.parametrize(
    ("scheduler", "says", "warm"),
    [("local", "", True), ("kubernetes", "", True), ("slurm", "", False), ("slurm", "true", True), ("local", "false", False)],
)  # fmt: skip
def test_ranks_are_forked_as_the_partition_says_else_not_on_slurm(tmp_path, scheduler, says, warm):
    options = {"slurm": {"slurm": "{partition: x}"}, "kubernetes": {"kubernetes": "{namespace: x, image: y}"}}
    text = partition(
        scheduler=scheduler, nodes="{cores: 2, memory: 1GiB}", environments="{default: {python: python3}}",
        **({"warm": says} if says else {}), **options.get(scheduler, {}),
    )  # fmt: skip
    path = tmp_path / "systems.yaml"
    path.write_text(text)
    known = {**SCHEDULERS, "kubernetes": KubernetesOptions}
    (found,) = load_systems(path, schedulers=known, launchers={"plain"}, environ={}).select("mine")
    assert found.partition.warm is warm


def test_the_owner_of_a_partition_is_its_own_or_its_systems_or_that_of_the_defaults(tmp_path: Path):
    text = (
        "defaults: {owner: all}\n"
        "systems:\n"
        "  mine: {owner: '${OPS}', partitions: {a: {scheduler: local}, b: {scheduler: local, owner: ada}}}\n"
        "  other: {partitions: {a: {scheduler: local}}}\n"
    )
    systems = load(tmp_path, text, OPS="@hpc/ops")
    owners = [one.partition.owner for name in ("mine", "other") for one in systems.select(name)]
    assert owners == ["@hpc/ops", "ada", "all"]


def test_included_files_bring_systems_and_take_defaults(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.yaml").write_text("systems: {b: {partitions: {p: {scheduler: local}}}}\n")
    (target,) = load(tmp_path, "include: [sub/b.yaml]\ndefaults: {max_jobs: 7}\n").select("b:p")
    assert target.partition.max_jobs == 7


def test_an_escaped_variable_reaches_the_run_as_text(tmp_path: Path):
    from pytest_mlhpc.config.build import fill

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
    own, other = tmp_path / "systems.yaml", tmp_path / "x.yaml"
    assert find_systems_file(tmp_path, None).name == "builtin.yaml"
    own.touch()
    assert find_systems_file(tmp_path, None) == own
    other.touch()
    assert find_systems_file(tmp_path, str(other)) == other


def test_the_built_in_file_has_this_machine(tmp_path: Path):
    systems = load_systems(find_systems_file(tmp_path, None), schedulers={"local": None}, environ={})
    assert "local:cpu" in [target.partition.id for target in systems.select("local")]


def test_a_file_changes_this_machine_only_by_defining_it(tmp_path: Path):
    """Its defaults are for its own systems, and a check of all of them leaves out what it does not name."""
    other = "defaults: {max_jobs: 3, preset: small}\n" + partition(scheduler="local")
    systems = load(tmp_path, other)
    (target,) = systems.select("local:cpu")
    assert (target.partition.max_jobs, target.partition.preset) == (8, "smoke")
    assert [target.partition.id for target in systems.every_target()[0]] == ["mine:cpu"]
    (own,) = load(tmp_path, other.replace("mine:", "local:")).select("local")
    assert (own.partition.max_jobs, own.partition.preset) == (3, "small")


def test_the_projects_own_file_is_valid():
    schedulers = dict(ChainMap(*make_manager().hook.mlhpc_schedulers()))
    found = load_systems(HERE.parents[1] / "systems.yaml", schedulers=schedulers, environ={})
    assert {"local", "testcluster"} <= set(found.entries)


def test_the_shell_of_setup_stays_as_it_was_written(tmp_path: Path):
    setup = "export HOME=${HOME/home/work} # {x} $${"
    text = CIRRUS.replace("default: {modules", f'default: {{setup: "{setup}", modules')
    (target,) = load(tmp_path, text, MLHPC_ACCOUNT="x").select("cirrus")
    assert target.environment.extra["setup"] == setup


def test_loading_this_module_needs_pydantic_but_the_model_does_not():
    code = (
        "import sys, pytest_mlhpc.config.model, pytest_mlhpc.cli.systems; sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
def test_an_unknown_value_is_refused_with_the_nearest(tmp_path: Path, name, environment, text):
    with pytest.raises(UsageError, match=text):
        load(tmp_path, CIRRUS, MLHPC_ACCOUNT="z").select(name, environment)


def test_an_unknown_system_names_a_file_in_this_folder_that_was_not_read(tmp_path: Path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("systems.yaml").write_text("schema: 1\nsystems: {}\n")
    why = r"systems.yaml was not read: give \S+here/systems.yaml as mlhpc_systems_file, or to mlhpc as --systems-file"
    with pytest.raises(UsageError, match=why):
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
    place = f"{tmp_path}/systems.yaml:10: systems.cirrus.partitions.standard.slurm.account"
    why = "the environment variable MLHPC_ACCOUNT is not set (did you mean 'MLHPC_ACOUNT'?)"
    assert [str(problem) for problem in caught.value.problems] == [f"{place}: {why}"]


def test_a_value_from_a_variable_is_validated_once_it_is_known(tmp_path: Path):
    text = CIRRUS.replace("cores: 288", 'cores: "${CORES}"')
    assert load(tmp_path, text, MLHPC_ACCOUNT="z", CORES="64").select("cirrus")[0].partition.nodes.cores == 64
    why = r"systems.yaml:9: .*nodes.cores: should be a whole number, not the value of '\$\{CORES\}'"
    with pytest.raises(ConfigError, match=why):
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
    assert "hunter2" not in repr((systems.system("mine", display=True), systems))
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


@pytest.mark.parametrize(
    ("word", "meant"), [("gpu", "cuda"), ("AMD", "rocm"), ("intel", "xpu"), ("cerebras", "wse")]
)
def test_what_users_call_accelerators_is_answered_with_what_torch_calls_them(tmp_path: Path, word, meant):
    (problem,) = refused(tmp_path, partition(scheduler="local", accelerator=word))
    assert problem.endswith(f"(did you mean {meant!r}?)")


def test_included_files_have_a_limit(tmp_path: Path):
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"include: [{number + 1}.yaml]\n")
    assert "more than 50 included files" in refused(tmp_path, "include: [0.yaml]\n")[0]


# --- bad input


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["problems"][0] for mistake in MISTAKES])
def test_all_mistakes_are_named_with_line_key_and_nearest_name(tmp_path: Path, mistake):
    for name, content in mistake.get("files", {}).items():
        (tmp_path / name).write_text(content)
    text = CIRRUS if "example" in mistake else mistake.get("file") or partition(**mistake["partition"])
    for old, new in mistake.get("example", {}).items():
        text = text.replace(old, new)
    assert refused(tmp_path, text) == mistake["problems"]


@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "a*",
        "x" * 65,
        "a;rm -rf",
        "$(id)",
        "`id`",
        "a|b",
        "a>b",
        "a&b",
        "../a",
        "a/b",
        "..",
        "a b",
        "-a",
        "a:b",
        "é",
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "{NAME: {partitions: {p: {scheduler: local}}}}",
        "{s: {partitions: {NAME: {scheduler: local}}}}",
        "{s: {partitions: {p: {scheduler: local, environments: {NAME: {}}}}}}",
        "{s: {partitions: {p: {scheduler: local}}, datasets: {NAME: {path: /x, kind: real}}}}",
    ],
    ids=["a system", "a partition", "an environment", "a data set"],
)
def test_names_that_could_do_harm_are_refused(tmp_path: Path, text, name):
    problems = refused(tmp_path, f"systems: {text.replace('NAME', json.dumps(name, ensure_ascii=False))}\n")
    assert all(problem.startswith("systems.yaml:1: ") for problem in problems)
    assert any("is not a name" in problem or "control character" in problem for problem in problems)


@pytest.mark.parametrize("module", ["../x", "a b", "x; id", "$(id)", "-x", "a\n"])
def test_modules_that_could_do_harm_are_refused(tmp_path: Path, module):
    text = partition(scheduler="local", environments=f"{{d: {{modules: [{json.dumps(module)}]}}}}")
    assert any("is not a module" in problem for problem in refused(tmp_path, text))


def test_an_include_that_no_file_can_have_is_named(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    problems = refused(tmp_path, f"include: [loop, {'x' * 3000}, systems.yaml/x]\n")
    assert [problem.split(": ")[1] for problem in problems] == [f"include[{number}]" for number in range(3)]


def test_problems_of_all_files_are_named_at_once(tmp_path: Path):
    (tmp_path / "b.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "c.yaml").write_bytes(b"\xff")
    problems = refused(tmp_path, "include: [b.yaml, c.yaml, systems.yaml]\nsystemz: {}\n")
    assert [problem[0] for problem in problems] == ["b", "c", "s", "s"]


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "no/such", "missing.yaml"])
def test_an_option_that_is_no_file_is_a_usage_error(tmp_path: Path, name):
    with pytest.raises(UsageError, match=r"systems file .*there is no such file"):
        find_systems_file(tmp_path, name)


def test_a_circle_through_a_symbolic_link_is_detected(tmp_path: Path):
    (tmp_path / "link.yaml").symlink_to(tmp_path / "systems.yaml")
    assert "circle" in refused(tmp_path, "include: [link.yaml]\n")[0]


def test_defaults_times_partitions_cannot_explode(tmp_path: Path):
    defaults = ", ".join(f"k{number}: 1" for number in range(4000))
    partitions = ", ".join(f"p{number}: {{scheduler: local}}" for number in range(2000))
    text = f"defaults: {{{defaults}}}\nsystems: {{s: {{partitions: {{{partitions}}}}}}}\n"
    assert "values with defaults written out" in refused(tmp_path, text)[0]


JUNK = yaml.safe_load((HERE / "junk.yaml").read_text(encoding="utf-8"))
_MUTATION = st.tuples(st.integers(0, len(CIRRUS) - 1), st.integers(0, 12), st.sampled_from(JUNK["pieces"]))


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


_PATHS = sorted(paths_of(yaml.safe_load(CIRRUS)), key=str)


@given(st.sampled_from(_PATHS), odd(JUNK["words"]), st.none() | st.sampled_from(JUNK["words"]))
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
    assert (first.partition.max_jobs, first.partition.owner) == (4, "ada@example.org")
    assert second.environment.variables["HF_HOME"] == "/scratch/hf"


# --- the whole site


def test_a_site_says_how_many_false_alarms_it_accepts(tmp_path):
    assert load(tmp_path, partition(scheduler="local")).false_alarms == 1.0
    assert load(tmp_path, f"false_alarms: 2 per week\n{partition(scheduler='local')}").false_alarms == 60 / 7
    (tmp_path / "more.yaml").write_text("false_alarms: 9 per month\n")
    text = f"include: [more.yaml]\nfalse_alarms: 2 per month\n{partition(scheduler='local')}"
    assert load(tmp_path, text).false_alarms == 2.0
    (problem,) = refused(tmp_path, f"false_alarms: often\n{partition(scheduler='local')}")
    assert problem.startswith(
        "systems.yaml:1: false_alarms: 'often' is not a rate above 0; write it like '1 per month'"
    )
