"""The job script, how a failed set-up ends it, and the arguments of launchers and containers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from allocation_worlds import run_plan
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.config.model import Environment, NodeType, Partition
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.scheduler.script import FAILED_STEPS, batch_python, rank_wrapper, render_script
from pytest_mlhpc.provision.slurm.script import SLURM, directive, launcher_options, output_pattern

DEFAULT = Environment("default", "python3")
RUN = run_plan(workload="command", nodes=2, ranks=8, cores_per_rank=4, launcher="srun", python="")
PLAN = Plan("a", "", "/work/a", 2, 601.0, (RUN,))


def partition(accelerator="cpu", devices=0, **options):
    nodes = NodeType(16, 2**34, 4, devices)
    return Partition("s", "p", "slurm", "srun", accelerator, nodes, (DEFAULT,), scheduler_options=options)


def script(plan=PLAN, where=None, environment=DEFAULT, **named):
    named = {"name": "mlhpc-a", "lines_dir": "/work/lines", "payload": None, **named}
    return render_script(plan, where or partition(), environment, SLURM, **named)


def asked(plan=PLAN, where=None, environment=DEFAULT):
    """Return the plain words of the #SBATCH lines."""
    lines = script(plan, where, environment).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


# --- what sbatch is asked


def test_without_options_slurm_chooses_what_is_its_to_choose():
    assert asked() == [
        "--job-name=mlhpc-a", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=4", "--time=11",
        "--chdir=/work/a", "--output=/work/a/slurm.out", "--open-mode=append", "--no-requeue", "--export=NONE",
    ]  # fmt: skip


def test_every_option_has_its_line_and_the_sites_own_come_last():
    known = yaml.safe_load(Path(__file__).with_name("all_options.yaml").read_text())
    found = asked(replace(PLAN, excluded_nodes=("n6", "n7"), spares=1), partition(**known["options"]))
    assert set(found) >= set(known["lines"])
    assert found[-2:] == ["--hint=nomultithread", '-C"x y"']


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["--gpus-per-node=4"]),
        ({"gpu_type": "h100"}, ["--gpus-per-node=h100:4"]),
        ({"gpus": "gres", "gpu_type": "h100", "gres": "nvme:1"}, ["--gres=gpu:h100:4,nvme:1"]),
        ({"gpus": "gpus"}, ["--gpus=8"]),
        ({"gpus": "gpus-per-task"}, []),
        ({"gpus": "none", "gres": "cs:1"}, ["--gres=cs:1"]),
    ],
)
def test_accelerators_are_asked_for_in_the_sites_way(options, words):
    found = asked(where=partition("cuda", 4, **options))
    assert [word for word in found if re.match("--(gpus|gres)", word)] == words


def of_runs(*runs, nodes=2):
    return replace(PLAN, nodes=nodes, runs=runs)


ONE_RANK = of_runs(replace(RUN, nodes=1, ranks=1), nodes=1)
ONE_NODE = of_runs(replace(RUN, nodes=1), nodes=1)
MANY_AND_WIDE = of_runs(replace(RUN, ranks=6, cores_per_rank=5), replace(RUN, ranks=2, cores_per_rank=16))
UENV = {"uenv": {"image": "pytorch/v2.8.0:/user-environment", "view": "default"}}


@pytest.mark.parametrize(
    ("plan", "where", "option", "values"),
    [
        pytest.param(ONE_RANK, partition("cuda", 4), "gpus-per-node", ["=1"], id="a shared node gives the devices of its ranks"),
        pytest.param(ONE_RANK, partition("cuda", 4, exclusive=True), "gpus-per-node", ["=4"], id="a whole node gives all"),
        pytest.param(ONE_RANK, partition("cpu", 4), "gpus-per-node", ["=4"], id="who uses no devices gets all of them"),
        pytest.param(PLAN, partition(exclusive="multi-node"), "exclusive", [""], id="several nodes may have to be whole"),
        pytest.param(ONE_NODE, partition(exclusive="multi-node"), "exclusive", [], id="a single one need not be"),
        pytest.param(PLAN, partition(tasks="srun"), "ntasks-per-node", [], id="tasks may be forbidden in the job script"),
        pytest.param(PLAN, partition(tasks="srun"), "cpus-per-task", [], id="and their cores"),
        pytest.param(of_runs(), partition(), "ntasks-per-node", ["=1"], id="without runs there is one task"),
        pytest.param(of_runs(), partition(), "cpus-per-task", ["=16"], id="with the cores of its node"),
        pytest.param(MANY_AND_WIDE, partition(), "cpus-per-task", ["=16"], id="the run that needs most cores decides"),
        pytest.param(PLAN, partition(memory="all"), "mem", ["=0"], id="all memory of a node is zero to sbatch"),
        *[
            pytest.param(replace(PLAN, time_limit_s=seconds), partition(), "time", [f"={minutes}"], id=f"{seconds} s")
            for seconds, minutes in ((1.0, 1), (60.0, 1), (60.5, 2), (86400.0, 1440))
        ],
    ],
)  # fmt: skip
def test_sbatch_is_asked_for(plan, where, option, values):
    head = f"--{option}"
    found = [word.removeprefix(head) for word in asked(plan, where) if re.match(rf"{head}(=|$)", word)]
    assert found == values


def test_a_uenv_is_the_jobs_own():
    found = asked(environment=Environment("u", "python3", extra=UENV))
    assert found[-2:] == ["--uenv=pytorch/v2.8.0:/user-environment", "--view=default"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--exclusive", "#SBATCH --exclusive"),
        ("--constraint=a&b", "#SBATCH --constraint=a&b"),
        ("--comment=a b", '#SBATCH --comment="a b"'),
        ('--comment="', '#SBATCH --comment="\\""'),
        ("--comment=#", '#SBATCH --comment="#"'),
        ("--comment=\\", '#SBATCH --comment="\\\\"'),
        ("--comment=", "#SBATCH --comment="),
    ],
)
def test_a_directive_is_quoted_only_where_sbatch_needs_it(word, line):
    assert directive(word) == line


@pytest.mark.parametrize(
    ("path", "pattern"), [("/a", "/a"), ("/50%", "/50%%"), ("/a\\b", "/a\\\\b"), ("/%\\", "/%\\\\")]
)
def test_a_path_is_no_file_name_pattern(path, pattern):
    assert output_pattern(path) == pattern


@pytest.mark.parametrize(
    "named",
    [
        {"name": "a\nb"},
        {"lines_dir": "/a\n#SBATCH --uid=0"},
        {"payload": "/a\0"},
        {"payload": "/a:b"},
        {"name": "\udcff"},
    ],
)
def test_what_no_line_can_say_is_refused(named):
    with pytest.raises(UsageError, match="which a job script cannot say"):
        script(**named)


# --- what bash reads

_NAMES = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/:"), min_size=1, max_size=40
).filter(lambda name: name not in {".", ".."} and len(name.encode()) < 200)


def job(folder, environment=None, **named):
    """Run the script of a plan in *folder* with an interpreter that shows its arguments; return those and PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").touch()
    python = folder / "an interpreter's stub"
    python.write_text('#!/bin/bash\n[ "$1" = -c ] || printf "%s\\0" "$@" "$PYTHONPATH"\n')
    python.chmod(0o755)
    environment = replace(environment or DEFAULT, python=str(python))
    text = script(replace(PLAN, directory=str(folder)), environment=environment, **named)
    done = run(text)
    assert (done.returncode, done.stderr) == (0, "")
    *argv, path, _ = done.stdout.split("\0")
    return argv, path


def run(text):
    environ = {"PATH": os.environ["PATH"], "SLURMD_NODENAME": "node1"}
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, encoding="utf-8", check=False, env=environ
    )


@given(name=_NAMES, lines=_NAMES, payload=_NAMES)
def test_bash_reads_back_every_path(tmp_path_factory, name, lines, payload):
    folder = tmp_path_factory.mktemp("job")
    try:
        zipped = folder / payload
        zipped.touch()
        argv, path = job(folder / "x" / name, lines_dir=f"/{lines}", payload=str(zipped))
    finally:
        shutil.rmtree(folder)
    plan = f"{folder}/x/{name}/plan.json"
    assert argv == ["-m", "pytest_mlhpc.node.batch.main", "--lines", f"/{lines}", plan]
    assert path == str(zipped)


def test_the_payload_goes_before_a_modules_own_path(tmp_path):
    (tmp_path / "p.zip").touch()
    environment = replace(DEFAULT, extra={"setup": "export PYTHONPATH=/site"})
    assert job(tmp_path / "a", environment, payload=str(tmp_path / "p.zip"))[1] == f"{tmp_path}/p.zip:/site"


QUOTED = "PLACE=/a/home/b\nexport PYTHONPATH=\"${PLACE/home/work} $(printf %s 'it'\"'\"'s')\"\n"
MODULE = 'module() { PYTHONPATH="$PYTHONPATH,$*"; export PYTHONPATH; }'


@pytest.mark.parametrize(
    ("modules", "extra", "path"),
    [
        pytest.param((), {"setup": QUOTED}, "/a/work/b it's", id="the site's own lines come first and unchanged"),
        pytest.param(("a/1", "b"), {"setup": MODULE}, ",load a/1,load b", id="modules are loaded in order after setup"),
        pytest.param((), {"venv": "FOLDER/my venv"}, "venv", id="a venv is entered"),
        pytest.param(
            (), {"setup": 'PATH="FOLDER/it\'s conda":$PATH', "conda": "my env"}, "activate my env", id="a conda environment is entered"
        ),
    ],
)  # fmt: skip
def test_an_environment_is_set_up(tmp_path, modules, extra, path):
    conda = tmp_path / "it's conda"
    for file, text in {
        tmp_path / "my venv/bin/activate": "export PYTHONPATH=venv\n",
        conda / "etc/profile.d/conda.sh": 'conda() { export PYTHONPATH="$*"; }\n',
        conda / "conda": f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(str(conda))}\n",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    extra = {key: value.replace("FOLDER", str(tmp_path)) for key, value in extra.items()}
    assert job(tmp_path / "a", replace(DEFAULT, modules=modules, extra=extra))[1] == path


@pytest.mark.parametrize(
    ("environment", "code", "text"),
    [
        (replace(DEFAULT, extra={"setup": "fail 70 'no licence'"}), 70, "no licence"),
        (replace(DEFAULT, modules=("a",), extra={"setup": "module() { return 1; }"}), 71, "module a cannot be loaded"),
        (replace(DEFAULT, extra={"venv": "/no where"}), 72, "venv /no where cannot be activated"),
        (replace(DEFAULT, extra={"conda": "x", "setup": "PATH=/nowhere"}), 73, "the shell of a job has no command conda"),
        (replace(DEFAULT, python="/no/python"), 76, "there is no interpreter /no/python"),
        (replace(DEFAULT, python="false"), 76, "false does not run or is older than Python 3.9"),
    ],
)  # fmt: skip
def test_a_set_up_that_fails_says_what_and_where(tmp_path, environment, code, text):
    (tmp_path / "plan.json").touch()
    done = run(script(replace(PLAN, directory=str(tmp_path)), environment=environment))
    assert (done.returncode, code in FAILED_STEPS, done.stdout) == (code, True, "")
    assert f"mlhpc: node1: {text}" in done.stderr


def test_a_node_that_does_not_see_the_plan_says_so(tmp_path):
    done = run(script(replace(PLAN, directory=str(tmp_path))))
    text = f"cannot read {tmp_path}/plan.json: set shared_directory under slurm:"
    assert (done.returncode, done.stderr) == (77, f"mlhpc: node1: {text}\n")


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed; bash -n reads every script"
)
def test_shellcheck_has_nothing_to_say():
    extra = {"venv": "/v", "conda": "c"}
    text = script(environment=replace(DEFAULT, modules=("a",), extra=extra), payload="/p.zip")
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == ""


PLAIN = Environment("default", "python3")


def container(runtime, **more):
    """Return an environment in a container that already mounts /data."""
    extra = {"image": "/i.sif", "mounts": ["/data:/data"], "runtime": runtime, **more}
    said = {key: value for key, value in extra.items() if value}
    return Environment("c", "python3", extra={"container": said})


def srun_options(environment, *binds, launch=None, **options):
    nodes = NodeType(16, 2**34, 4, 4)
    partition = Partition("s", "p", "slurm", "srun", "cuda", nodes, (environment,), scheduler_options=options)
    return launcher_options(partition, environment, binds, **(launch or {}))


HINT = "--hint=nomultithread"


@pytest.mark.parametrize(
    ("options", "launch", "words"),
    [
        pytest.param({}, {}, (), id="nothing"),
        pytest.param(
            {"mpi": "pmix", "gpus": "gpus-per-task", "gpu_type": "h100", "srun": [HINT]}, {},
            ("--mpi=pmix", "--gpus-per-task=h100:1", HINT), id="the site's own words come last",
        ),
        *[
            pytest.param(
                {"gpus": "gpus-per-task", "srun": [HINT]}, {"launcher": launcher, "ranks_per_node": 4}, words,
                id=f"{launcher} decides what a task is",
            )
            for launcher, words in (
                ("srun", ("--gpus-per-task=1", HINT)),
                ("torchrun", ("--gpus-per-task=4", HINT)),
                ("mpirun", ()),
                ("poprun", ()),
            )
        ],
    ],
)  # fmt: skip
def test_srun_is_told_of_mpi_and_devices(options, launch, words):
    assert srun_options(PLAIN, launch=launch, **options) == words


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("pyxis", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("enroot", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("edf", ("--environment=/i.sif",)),
        ("apptainer", ()),
    ],
)  # fmt: skip
def test_srun_starts_some_containers(runtime, words):
    assert srun_options(container(runtime, workdir="/w"), "/state") == words


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (None, "apptainer exec --nv --bind=/data:/data --bind=/state:/state --pwd=/w /i.sif"),
        ("singularity", "singularity exec --nv --bind=/data:/data --bind=/state:/state --pwd=/w /i.sif"),
        ("podman", "podman run --rm --network=host --ipc=host --env-host --volume=/data:/data --volume=/state:/state --workdir=/w /i.sif"),
        ("shifter", "shifter --image=/i.sif --volume=/data:/data --volume=/state:/state --workdir=/w --"),
        ("sarus", "sarus run --mount=type=bind,source=/data,destination=/data --mount=type=bind,source=/state,destination=/state --workdir=/w /i.sif"),
        ("pyxis", ""),
        ("edf", ""),
    ],
)  # fmt: skip
def test_other_containers_are_started_before_the_interpreter(runtime, words):
    found = rank_wrapper(container(runtime, workdir="/w"), ["/state", "/state"], accelerator="cuda")
    assert " ".join(found) == words


@pytest.mark.parametrize(
    ("environment", "binds", "words"),
    [
        pytest.param(
            container("apptainer", image="/my images/i.sif", mounts=[]), [], ("apptainer", "exec", "/my images/i.sif"),
            id="an image with spaces stays one word",
        ),
        pytest.param(PLAIN, ["/state"], (), id="without a container nothing comes before it"),
    ],
)  # fmt: skip
def test_words_before_the_interpreter_are_words(environment, binds, words):
    assert rank_wrapper(environment, binds) == words


@pytest.mark.parametrize(
    ("runtime", "binds", "text"),
    [
        ("docker", [], "environment 'c': container runtime 'docker' cannot be used in a job"),
        ("apptainer", ["/a,b"], "choose another shared_directory"),
        ("apptainer", ["/a:b"], "choose another shared_directory"),
    ],
)
def test_what_cannot_be_started_or_mounted_is_refused(runtime, binds, text):
    with pytest.raises(UsageError, match=text):
        rank_wrapper(container(runtime), binds)


@pytest.mark.parametrize(
    ("options", "environment", "python"),
    [
        ({}, Environment("d", "/opt/python"), "/opt/python"),
        ({}, container("apptainer"), "python3"),
        ({"batch_python": "/host/python"}, container("edf"), "/host/python"),
    ],
)
def test_the_batch_runs_on_the_host(options, environment, python):
    assert batch_python(partition(**options), environment) == python
