"""``slurm:`` of a partition: its options, how mistakes are named, the settings, and what its limits refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import ConfigError
from pytest_mlhpc.jobs.spec import MARGIN_S
from pytest_mlhpc.provision.scheduler.client import PartitionLimits, QosLimits
from pytest_mlhpc.provision.slurm.options import (
    SlurmSettings,
    beyond_limits,
    longest_allocation_s,
    settings_of,
)
from pytest_mlhpc.provision.slurm.schema import SlurmOptions


def load(folder, option, devices=0, **environ):
    text = (Path(__file__).parent / "systems_with_an_option.yaml").read_text()
    accelerator = "cuda" if devices else "cpu"
    for word, value in {"OPTION": option, "DEVICES": str(devices), "ACCELERATOR": accelerator}.items():
        text = text.replace(word, value)
    (folder / "systems.yaml").write_text(text)
    systems = load_systems(folder / "systems.yaml", schedulers={"slurm": SlurmOptions}, environ=environ)
    return systems.select("mine")[0].partition


def settings(folder, option, devices=0):
    return settings_of(load(folder, option, devices))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partiton: standard", "partiton: unknown key (did you mean 'partition'?)"),
        ("client: pyslrm", "client: 'pyslrm' is not one of 'auto', 'cli' or 'pyslurm' (did you mean 'pyslurm'?)"),
        ("gpus: gpu-per-node", "gpus: 'gpu-per-node' is not one of 'gpus-per-node', 'gres', 'gpus', 'gpus-per-task' or 'none' (did you mean 'gpus-per-node'?)"),
        ("tasks: sbacth", "tasks: 'sbacth' is not one of 'sbatch' or 'srun' (did you mean 'sbatch'?)"),
        ("exclusive: multinode", "exclusive: 'multinode' is not true, false or multi-node"),
        ("memory: lots", "memory: 'lots' is not a size; write it like 768GiB, 1.5TB or 4096B; or default, all"),
        ("max_time: 30s", "max_time: is 30 s, and time_limit of its runs 3600 s: no run would fit"),
        ("max_time: 1 fortnight", "max_time: '1 fortnight' is not a duration; write it like 1h, 30m, 1h30m or 3600 (seconds)"),
        ("shared_directory: work", "shared_directory: 'work' is not an absolute path"),
        ("shared_directory: /a:b", "shared_directory: '/a:b' holds a ':', which PYTHONPATH cannot take"),
        ('qos: "a\\nb"', "qos: 'a\\nb' holds the control character '\\n'"),
        ('qos: "a\\tb"', "qos: 'a\\tb' holds the control character '\\t'"),
        ('qos: " "', "qos: ' ' is empty"),
        ("qos: [a]", "qos: ['a'] should be text"),
        ("spares: -1", "spares: input should be greater than or equal to 0, not -1"),
        ("sbatch: [hint]", "sbatch[0]: 'hint' is no option of sbatch; write it like --name=value"),
        ("sbatch: [-C gpu]", "sbatch[0]: '-C gpu' is two words; write '-Cgpu'"),
        ("sbatch: [--hint nomultithread]", "sbatch[0]: '--hint nomultithread' is two words; write '--hint=nomultithread'"),
        ("sbatch: [--job-name=x]", "sbatch[0]: '--job-name=x' cannot be given here: it is set for each run"),
        ("sbatch: [-Jx]", "sbatch[0]: '-Jx' cannot be given here: it is set for each run"),
        ("sbatch: [--mem=1G]", "sbatch[0]: '--mem=1G' cannot be given here: use the key 'memory'"),
        ("sbatch: [--job-n=x]", "sbatch[0]: '--job-n=x' cannot be given here: it is set for each run"),
        ("sbatch: [--outp=x]", "sbatch[0]: '--outp=x' cannot be given here: it is set for each run"),
        ("sbatch: [-HN1]", "sbatch[0]: '-HN1' cannot be given here: it is set for each run"),
        ("sbatch: [--clusters=gpu]", "sbatch[0]: '--clusters=gpu' cannot be given here: jobs go to the cluster of slurm.conf alone; for another cluster start pytest with SLURM_CONF naming its slurm.conf"),
        ('nodelist: "nid[003-001]"', "nodelist: host list 'nid[003-001]': the range '003-001' runs backwards"),
        ('exclude: "nid[00"', "exclude: host list 'nid[00': brackets do not match"),
        ("memory: {a: 1}", "memory: {'a': 1} is not a size; write it like 768GiB, 1.5TB or 4096B; or default, all"),
        ("memory: 16000", "memory: 16000 without a unit is 15.6KiB; did you mean 16000MiB?; or default, all"),
        ("sbatch: [--time=5]", "sbatch[0]: '--time=5' cannot be given here: use the key 'time_limit' of the partition or test"),
        ("srun: [--mpi=pmix]", "srun[0]: '--mpi=pmix' cannot be given here: use the key 'mpi'"),
        ("srun: [-n4]", "srun[0]: '-n4' cannot be given here: it is set for each run"),
        ("{gpus: none, gpu_type: h100}", "gpu_type says which GPUs to ask for, gpus: none to ask for none; leave one out"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_the_nearest_word(tmp_path, option, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, option)
    (problem,) = str(caught.value).splitlines()
    line = 8 if option.startswith("{") else 9
    assert problem.startswith(f"{tmp_path}/systems.yaml:{line}: systems.mine.partitions.cpu.slurm")
    assert problem.endswith(message)


def test_a_line_break_that_comes_from_a_variable_is_refused_without_its_text(tmp_path):
    with pytest.raises(ConfigError, match=r"the value of '\${A}' holds the control character") as caught:
        load(tmp_path, 'account: "${A}"', A="secret\n#SBATCH --uid=0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "devices", "way"),
    [
        ("qos: x", 0, "none"),
        ("qos: x", 4, "gpus-per-node"),
        ("gpus: gres", 4, "gres"),
        ("gpus: none", 4, "none"),
    ],
)
def test_devices_are_asked_for_where_there_are_some(tmp_path, option, devices, way):
    assert settings(tmp_path, option, devices).gpus == way


@pytest.mark.parametrize(
    ("option", "one", "several"), [("false", False, False), ("true", True, True), ("multi-node", False, True)]
)
def test_whole_nodes_may_depend_on_their_number(tmp_path, option, one, several):
    found = settings(tmp_path, f"exclusive: {option}")
    assert (found.whole_nodes(1), found.whole_nodes(2)) == (one, several)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param("{}", SlurmSettings(), id="nothing"),
        pytest.param("account: 1234", SlurmSettings(account="1234"), id="the number of an account is text"),
        pytest.param(
            "{client: auto, memory: 4GiB, max_time: 2h, pending_limit: 10m, energy: true, spares: 1,"
            " sbatch: [--hint=nomultithread], srun: [-vv], mpi: pmix, shared_directory: /work}",
            SlurmSettings(
                client="auto", memory=2**32, max_time_s=7200.0, pending_limit_s=600.0, energy=True, spares=1,
                sbatch=("--hint=nomultithread",), srun=("-vv",), mpi="pmix", shared_directory="/work",
            ),
            id="all",
        ),
    ],
)  # fmt: skip
def test_what_is_said_is_read_and_the_rest_has_defaults(tmp_path, options, expected):
    assert settings(tmp_path, options) == expected


def test_validated_options_can_be_changed_and_validated_again(tmp_path):
    options = dict(load(tmp_path, "{memory: 4GiB, max_time: 2h, exclusive: multi-node}").scheduler_options)
    assert SlurmOptions.model_validate(options).model_dump() == options
    with pytest.raises(ValidationError):
        SlurmOptions.model_validate({**options, "reservation": "a\nb"})


def test_reading_settings_needs_no_pydantic():
    code = "import sys, pytest_mlhpc.provision.slurm.script, pytest_mlhpc.builtin; print('pydantic' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


PARTITION = SimpleNamespace(id="site:part", nodes=SimpleNamespace(max=8, devices=0, cores=16))


def part(**limits):
    return PartitionLimits(**{"name": "cpu", "up": True, **limits})


WIDE, LONG = part(max_nodes=8, max_time_s=3600, total_nodes=8), QosLimits("q", 3600, 8)
TIME = "120 s are needed (time_limit and margin), but "


@pytest.mark.parametrize(
    ("spec", "limits", "qos", "settings", "text"),
    [
        pytest.param({"nodes": 8, "time_limit_s": 3600 - MARGIN_S}, WIDE, LONG, {"max_time_s": 3600.0}, "", id="within all limits"),
        pytest.param({"nodes": 8, "time_limit_s": 1e6}, None, None, {}, "", id="without an answer of Slurm"),
        ({"nodes": 9}, None, None, {}, "9 nodes are wanted, but systems.yaml: site:part: nodes.max is 8"),
        ({"nodes": 3}, part(max_nodes=2), None, {}, "3 nodes are wanted, but MaxNodes of Slurm's partition cpu is 2"),
        ({"nodes": 3}, part(total_nodes=2), None, {}, "3 nodes are wanted, but nodes of Slurm's partition cpu is 2"),
        ({"nodes": 3}, part(), QosLimits("short", max_nodes=2), {}, "3 nodes are wanted, but the limit of QoS short is 2"),
        ({}, None, None, {"max_time_s": 100.0}, f"{TIME}systems.yaml: site:part: slurm.max_time is 100 s"),
        ({}, part(max_time_s=100), None, {}, f"{TIME}MaxTime of Slurm's partition cpu is 100 s"),
        ({}, part(), QosLimits("short", max_time_s=100), {}, f"{TIME}MaxWall of QoS short is 100 s"),
        ({}, part(up=False), None, {}, "Slurm's partition cpu is down"),
        ({"nodes": 2, "ranks": 34, "workload": "resnet50"}, None, None, {}, "17 ranks on each node are wanted, which has 16 cores"),
        pytest.param({"nodes": 2, "ranks": 34}, None, None, {}, "", id="a program may have more processes than cores"),
    ],
)  # fmt: skip
def test_what_goes_beyond_a_limit_is_refused_by_the_limit_that_says_so(spec, limits, qos, settings, text):
    fields = {"nodes": 1, "time_limit_s": 60.0, "ranks": 1, "workload": "command", **spec}
    assert beyond_limits(SimpleNamespace(**fields), PARTITION, SlurmSettings(**settings), limits, qos) == text


def test_the_longest_allocation_is_the_least_of_what_is_known():
    assert longest_allocation_s(SlurmSettings(), None, None) is None
    assert longest_allocation_s(SlurmSettings(max_time_s=9.0), part(max_time_s=7), QosLimits("q", 8)) == 7


# --- by ssh

BEHIND = """\
systems:
  mine:
    transport: {{ssh: {destination}}}
    partitions:
      one:
        scheduler: slurm
        launcher: srun
        nodes: {{cores: 4, memory: 8GiB}}
        environments: {{default: {{python: /usr/bin/python3}}}}
        slurm: {{{options}}}
      two:
        scheduler: slurm
        launcher: srun
        nodes: {{cores: 4, memory: 8GiB}}
        environments: {{default: {{python: /usr/bin/python3}}}}
        slurm: {{shared_directory: /work}}
        transport: {{ssh: other}}
"""


def behind_ssh(folder, destination="ada@login", options="shared_directory: /work"):
    (folder / "systems.yaml").write_text(BEHIND.format(destination=destination, options=options))
    schedulers = {"slurm": SlurmOptions, "local": None}
    targets = load_systems(folder / "systems.yaml", schedulers=schedulers, environ={}).select("mine")
    return {target.partition.name: target.partition for target in targets}


@pytest.mark.parametrize(
    "destination", ["ada@login", "login", "a.b_c@login-1.example.org", "ssh://ada@login:2222"]
)
def test_a_system_says_how_its_partitions_are_reached_and_a_partition_says_otherwise(tmp_path, destination):
    found = behind_ssh(tmp_path, destination)
    assert {name: partition.ssh for name, partition in found.items()} == {"one": destination, "two": "other"}


@pytest.mark.parametrize(
    "destination",
    [
        "-oProxyCommand=x",
        '"a b"',
        '"ada@login;id"',
        '"$(id)"',
        '"@login"',
        '"login:22"',
        "ada@-login",
        '"login:port"',
        '""',
        "7",
        "[a]",
        '"a\\nb"',
    ],
)
def test_what_ssh_could_take_for_anything_but_a_host_is_refused(tmp_path, destination):
    with pytest.raises(ConfigError, match="is not a destination of ssh: user@login, or ssh://user@login:22"):
        behind_ssh(tmp_path, destination)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "partition: cpu",
            "slurm.shared_directory: is missing: with `transport` it is an absolute folder of that cluster",
        ),
        (
            "shared_directory: /work, client: pyslurm",
            "slurm.client: pyslurm cannot be used by ssh; leave `client` out",
        ),
    ],
)
def test_what_a_system_behind_ssh_needs_is_said(tmp_path, options, text):
    with pytest.raises(ConfigError) as caught:
        behind_ssh(tmp_path, options=options)
    assert text in str(caught.value)


def test_only_slurm_is_reached_by_ssh(tmp_path):
    text = "systems: {mine: {transport: {ssh: login}, partitions: {cpu: {scheduler: local}}}}"
    (tmp_path / "systems.yaml").write_text(text)
    with pytest.raises(ConfigError, match="only Slurm's commands are run by ssh, and the scheduler is local"):
        load_systems(tmp_path / "systems.yaml", schedulers={"local": None}, environ={})
