"""What a test says of its software and its files, and what is wrong with it."""

from dataclasses import replace

import pytest

from pytest_mlhpc.config.model import Environment
from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs import software
from pytest_mlhpc.jobs.builds import Build, build_plan
from pytest_mlhpc.jobs.ledger_entry import spec_digest
from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.plan import builds_of, run_plan
from pytest_mlhpc.jobs.spec import same_needs
from pytest_mlhpc.node.protocol.plan import BuildPlan
from pytest_mlhpc.provision.slurm.schema import SlurmOptions

RATE = [Metric("rate", r"rate: (\S+)", "items/s")]


@pytest.fixture
def folder(tmp_path):
    """The folder of a test."""
    for name in ("bench.sh", "a.csv", "b.csv"):
        (tmp_path / name).write_text("12345")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.c").write_text("int")
    return tmp_path


@pytest.fixture
def on_slurm(target):
    """A target with a container and two environments."""
    environments = (
        Environment("default", "python3", extra={"container": {"runtime": "apptainer", "image": "old.sif"}}),
        Environment("new", "python3"),
    )
    options = SlurmOptions().model_dump()
    partition = replace(
        target.partition, scheduler="slurm", environments=environments, scheduler_options=options
    )
    return replace(target, partition=partition, environment=environments[0])


def files_of(given, folder, target, most=1 << 30):
    return software.files_of(given, folder, target.partition, most)


def test_files_folders_and_globs_are_put_where_they_lie_next_to_the_test(folder, target):
    found = files_of(["bench.sh", "src/", "*.csv", "./bench.sh"], folder, target)
    assert found == {name: str(folder / name) for name in ("bench.sh", "src", "a.csv", "b.csv")}
    assert files_of(["../bench.sh"], folder / "src", target) == {"bench.sh": str(folder / "bench.sh")}
    assert files_of(["../*.csv"], folder / "src", target) == {
        name: str(folder / name) for name in ("a.csv", "b.csv")
    }


@pytest.mark.parametrize(
    ("given", "limit", "text"),
    [
        (["bunch.sh"], 1 << 30, "there is no 'bunch.sh' in {folder} (did you mean 'bench.sh'?)"),
        (["*.txt"], 1 << 30, "there is no '*.txt' in {folder}"),
        (["x" * 300], 1 << 30, f"there is no '{'x' * 196}... in {{folder}}: File name too long"),
        (
            ["**x"],
            1 << 30,
            "there is no '**x' in {folder}: Invalid pattern: '**' can only be an entire path component",
        ),
        (["src"], 2, "have 3B, more than 2B; name a folder that the nodes see"),
        (
            ["bench.sh", "{folder}/src/../src/../bench.sh", "{folder}x/bench.sh"],
            1 << 30,
            "would both be bench.sh",
        ),
    ],
)
def test_files_that_cannot_be_are_named(folder, target, given, limit, text):
    other = folder.with_name(folder.name + "x")
    other.mkdir()
    (other / "bench.sh").write_text("another")
    with pytest.raises(software.SoftwareError) as caught:
        files_of([one.format(folder=folder) for one in given], folder, target, limit)
    assert text.format(folder=folder) in str(caught.value)


def test_a_pod_gets_no_more_than_an_object_of_the_server_holds(folder, target):
    (folder / "large").write_bytes(b"x" * (software.POD_FILES_BYTES + 1))
    pods = replace(target, partition=replace(target.partition, scheduler="kubernetes"))
    with pytest.raises(
        software.SoftwareError,
        match="a pod gets 900KiB at most without a volume; say where this machine sees a volume of",
    ):
        files_of(["large"], folder, pods)
    assert files_of(["large"], folder, target)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"env": {"A B": 1}}, "env: 'A B' is no name of a variable"),
        ({"env": {"A": [1]}}, "env: A: expected text or a number, found [1]"),
        ({"env": {"A": True}}, "env: A: expected text or a number, found True"),
        ({"env": {"MLHPC_RUN": "x"}}, "env: MLHPC_RUN is set for each run; choose another name"),
        ({"environment": "nwe"}, "has no environment 'nwe'; it has default, new (did you mean 'new'?)"),
        ({"modules": ["a b"]}, "modules: 'a b' is no name of a module"),
        ({"image": "a b"}, "image: 'a b' is no name of an image"),
        (
            {"environment": "new", "image": "x.sif"},
            "image: sys:part has no container whose image could be another",
        ),
        ({"slurm": {"partition": "x"}}, "slurm: partition is the site's to say, in systems.yaml"),
        ({"slurm": {"constrain": "x"}}, "slurm.constrain: unknown key (did you mean 'constraint'?)"),
        ({"artifacts": "../x"}, "artifacts: '../x' is no path in the run's folder"),
        (
            {"artifacts": "x", "cwd": "/tmp"},
            "artifacts: are files of the run's own folder, as those of metrics are; leave out cwd",
        ),
        ({"sanity": "(a+)+"}, "sanity: pattern '(a+)+' repeats a repeat, which can take for ever"),
        ({"sanity": lambda: True}, "<lambda> does not take one argument, the run"),
        ({"sanity": [3]}, "sanity: pattern 3 is no text"),
        ({"ranks_per_node": 0}, "ranks_per_node: 0 is less than 1"),
        (
            {"reference": {"sys": (180, 0.1, None)}},
            "reference: sys: expected a positive number in the unit of rate",
        ),
        (
            {"reference": {"sys": "180 GB/s"}},
            "reference: sys: '180 GB/s' is in GB/s, and rate is declared in items/s",
        ),
        (
            {"reference": {"sys": "180 itms/s"}},
            "reference: sys: unit 'itms/s' is unknown; did you mean 'items/s'",
        ),
    ],
)
def test_what_a_test_cannot_say_is_named(problems, on_slurm, asked, text):
    fields = {"command": ["x"], "metrics": RATE, "schemas": {"slurm": SlurmOptions}, **asked}
    assert any(text in problem for problem in problems("command", on=on_slurm, **fields))


def test_modules_need_a_job_script(problems, target):
    (problem,) = problems("command", on=target, command=["x"], metrics=RATE, modules="gcc/14")
    assert "modules: are loaded by a job script, and sys:part (fake) has none" in problem


def test_software_of_a_test_makes_another_job_and_another_definition(declare, on_slurm):
    def spec(**asked):
        return declare("command", on=on_slurm, command=["x"], metrics=RATE, **asked)

    plain = spec()
    for asked in ({"modules": "gcc/14 openmpi"}, {"image": "new.sif"}):
        found = spec(**asked)
        assert found.definition != plain.definition
        assert not same_needs(found, plain)
    assert spec(modules="gcc/14 openmpi").target.environment.modules == ("gcc/14", "openmpi")
    container = spec(image="new.sif").target.environment.extra["container"]
    assert container == {"runtime": "apptainer", "image": "new.sif"}
    assert spec(environment="new").target.environment.name == "new"
    with_env = spec(env={"A": "{cores_per_rank}", "N": 2, "MY_KEY": "secret"})
    assert with_env.definition != plain.definition
    assert "secret" not in with_env.definition + str(with_env.asked) + repr(with_env)
    cores = str(on_slurm.partition.nodes.cores)
    assert run_plan(with_env, 0).variables == {"A": cores, "N": "2", "MY_KEY": "secret"}


def test_names_in_braces_that_are_no_value_stay_as_they_are(declare, target):
    spec = declare("command", on=target, command=["x", "{nodes}", "{}", '{"a": 1}', "{print}"], metrics=RATE)
    assert run_plan(spec, 0).argv == ("x", "1", "{}", '{"a": 1}', "{print}")


@pytest.mark.parametrize(
    ("asked", "started", "launcher"),
    [
        ({}, 1, "plain"),
        ({"nodes": 2}, 1, "plain"),
        ({"nodes": 2, "devices_per_node": 4}, 1, "plain"),
        ({"ranks_per_node": 1}, 1, "srun"),
        ({"nodes": 2, "ranks_per_node": 4}, 8, "srun"),
        ({"nodes": 2, "ranks_per_node": 1, "devices_per_node": 4}, 2, "srun"),
    ],
)
def test_a_program_is_started_once_unless_it_says_its_ranks(declare, on_slurm, asked, started, launcher):
    spec = declare("command", on=on_slurm, command=["x"], metrics=RATE, **asked)
    assert (spec.started, spec.launcher) == (started, launcher)
    assert spec.cores_per_rank == max(1, on_slurm.partition.nodes.cores // (asked.get("ranks_per_node") or 1))


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"sys": 180}, 180e6),
        ({"sys": (180, -0.05, 0.1)}, 171e6),
        ({"sys": (180, None, None), "sys:part": (100, -0.1, None)}, 90e6),
        ({"model x": 60, "other": 1}, 60e6),
    ],
)
def test_a_reference_is_found_by_partition_system_or_device(declare, target, given, limit):
    node = replace(target.partition.nodes, device_model="Vendor Model X 80GB")
    on = replace(target, partition=replace(target.partition, nodes=node))
    spec = declare("command", on=on, command=["x"], metrics=[Metric("rate", "(.)", "MB/s")], reference=given)
    assert spec.references == {"rate": pytest.approx(limit)}


@pytest.mark.parametrize(
    ("scheduler", "extra", "text"),
    [
        ("slurm", {}, ""),
        ("local", {"container": {"image": "x"}}, ""),
        ("kubernetes", {}, "where='login': nodes of sys:part see no folder of this machine; leave where out"),
        ("slurm", {"container": {"image": "x"}}, "where='login': the container of environment default is on nodes; leave where out"),
        ("slurm", {"uenv": {"image": "x"}}, "where='login': the uenv of environment default is on nodes"),
    ],
)  # fmt: skip
def test_a_build_is_made_on_the_login_node_where_nodes_find_it(target, tmp_path, scheduler, extra, text):
    partition = replace(target.partition, scheduler=scheduler)
    on = replace(target, partition=partition, environment=replace(target.environment, extra=extra))
    if not text:
        plan = build_plan("here", "tool", Build("make", where="login"), tmp_path, on)
        assert plan.before == (scheduler == "slurm")  # on `local` a run that needs it is on the same machine
        return
    with pytest.raises(SpecError) as caught:
        build_plan("here", "tool", Build("make", where="login"), tmp_path, on)
    assert text in str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("node_id", "names"),
    [("a[b]/t.py::test_it", "test_it"), ("t.py::TestA::test_it[sys:part-x::y[0]]", "TestA::test_it")],
)
def test_the_functions_of_a_test_are_found_by_its_file_and_names(declare, target, folder, node_id, names):
    metric = Metric("rate", extract=lambda run: 1, unit="items/s")
    spec = declare("command", on=target, node_id=node_id, folder=folder, command=["x"], metrics=[metric])
    assert spec.functions == f"{folder}/t.py::{names}"
    assert run_plan(spec, 0).functions == spec.functions
    moved = declare(
        "command", on=target, node_id="u.py::test_it", folder=folder.parent, command=["x"], metrics=[metric]
    )
    assert spec_digest(moved) == spec_digest(replace(spec, benchmark=moved.benchmark))


def test_a_build_on_the_login_node_has_no_figure_of_the_nodes(target, tmp_path):
    partition = replace(target.partition, scheduler="slurm")
    build = Build("make N={last_level_cache}", where="login")
    with pytest.raises(SpecError) as caught:
        build_plan("here", "tool", build, tmp_path, replace(target, partition=partition))
    assert "{last_level_cache} is known on the nodes alone" in str(caught.value.problems[0])


def test_builds_with_other_figures_are_other_builds_and_those_without_are_shared(declare):
    builds = tuple(
        BuildPlan(name, f"key-of-{name}", ("make", word)) for name, word in (("a", "N={nodes}"), ("b", "all"))
    )
    one, two = (builds_of(replace(declare("cosmoflow", nodes=count), builds=builds)) for count in (1, 2))
    assert [(build.argv, len(build.key)) for build in two] == [(("make", "N=2"), 8), (("make", "all"), 8)]
    assert one[0].key != two[0].key != "key-of-a"
    assert one[1].key == two[1].key == "key-of-b"
