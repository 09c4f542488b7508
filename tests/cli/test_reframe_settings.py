"""ReFrame's site configuration as systems.yaml: what is taken over, and what is asked."""

import json
from collections import ChainMap

import pytest
import yaml

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.cli import reframe_settings
from pytest_mlhpc.cli.init import with_systems
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import UsageError

#: A site that nobody has, with what public settings have: names from ReFrame, several levels, old and new forms.
SETTINGS = """
import os
import reframe.utility.osext as osext
from reframe.core.backends import register_launcher
from reframe.core.launchers import JobLauncher

@register_launcher("site_mpi")
class SiteLauncher(JobLauncher):
    def command(self, job): return ["site-mpirun"]

site_configuration = {
    "systems": [{
        "name": "hill", "descr": "The Hill", "hostnames": [osext.gethostname()], "modules": ["site"],
        "partitions": [
            {"name": "login", "scheduler": "local", "launcher": "local", "environs": ["builtin"]},
            {"name": "cpu nodes", "scheduler": "squeue", "launcher": "site_mpi", "time_limit": "0d1h30m0s", "max_jobs": 64,
             "access": ["--partition=standard", "-A z19", "--exclusive", "--hint=nomultithread", "--foo bar", "--time=10", "--mem 4G", "bare",
                        f"--reservation={osext.osgroup()}"],
             "processor": {"num_cpus": 128}, "features": ["remote"], "environs": ["gnu", "lost"],
             "env_vars": [["A", "1"], ["WHO", osext.osuser()]]},
            {"name": "gpu", "scheduler": "slurm", "launcher": "srun", "environs": ["gnu"],
             "devices": [{"type": "gpu", "arch": "gfx90a", "model": "MI250X", "num_devices": 4}],
             "resources": [{"name": "memory", "options": ["--mem={size}"]}],
             "container_platforms": [{"type": "Sarus"}]},
            {"name": "old", "scheduler": "pbs", "launcher": "mpirun"},
        ],
    }],
    "environments": [
        {"name": "gnu", "modules": ["gcc/14", {"name": "openmpi"}], "env_vars": {"B": "{x}"}, "prepare_cmds": ["ulimit -s 1"]},
        {"name": "gnu", "modules": ["/opt/gcc"], "target_systems": ["hill:gpu"], "cc": "mpicc", "ftn": "", "features": ["mpi"]},
    ],
}
"""


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def converted(settings):
    return reframe_settings.convert(reframe_settings.read_settings(settings))


def test_partitions_keep_scheduler_access_limits_and_software(converted):
    found = converted.systems["hill"]["partitions"]
    assert list(found) == ["login", "cpu-nodes", "gpu"]
    cpu = found["cpu-nodes"]
    assert cpu["slurm"] == {
        "partition": "standard", "account": "z19", "exclusive": True, "srun": ["--hint=nomultithread"], "sbatch": ["--foo=bar"],
    }  # fmt: skip
    assert (cpu["nodes"]["cores"], cpu["max_jobs"], cpu["time_limit"], cpu["features"]) == (
        128,
        64,
        "90m",
        ["remote"],
    )
    assert cpu["environments"]["gnu"] == {
        "python": "python3", "modules": ["site", "gcc/14", "openmpi"], "setup": "ulimit -s 1\n", "variables": {"A": "1", "B": "{{x}}"},
    }  # fmt: skip
    gpu = found["gpu"]
    assert (gpu["accelerator"], gpu["nodes"]["devices"], gpu["nodes"]["device_model"]) == (
        "rocm",
        4,
        "MI250X",
    )
    assert gpu["environments"]["gnu"] == {
        "python": "python3",
        "modules": ["site"],
        "setup": "module load /opt/gcc\n",
        "variables": {"CC": "mpicc"},
    }


def test_what_needs_a_person_is_asked_with_its_place(converted):
    assert converted.questions == [
        "hill:login: environment builtin: modules are not loaded on a partition without job script",
        "hill:cpu-nodes: launcher 'site_mpi' is not known; srun was taken",
        "hill:cpu-nodes: nodes: memory of a node (%m of sinfo, in MB); how many nodes a job may have (max)",
        "hill:cpu-nodes: slurm: `osext.osgroup()` is known to ReFrame alone; write its value",
        "hill:cpu-nodes: slurm: --time=10: say time_limit",
        "hill:cpu-nodes: slurm: --mem 4G: say slurm: memory",
        "hill:cpu-nodes: slurm: bare: 'bare' is no option of sbatch; write it like --name=value",
        "hill:cpu-nodes: environment gnu: the value of WHO is `osext.osuser()`, known to ReFrame alone; write it",
        "hill: environment 'lost' is not described in this file",
        "hill:cpu-nodes: environment lost: the value of WHO is `osext.osuser()`, known to ReFrame alone; write it",
        "hill:gpu: nodes: cores of a node (%c of sinfo); memory of a node (%m of sinfo, in MB); how many nodes a job may have (max)",
        "hill:gpu: resource 'memory' (--mem={size}): a test asks for such by slurm={...}",
        "hill: environment gnu has features (mpi); here partitions have them",
        "hill:gpu: containers by Sarus: give an environment `container: {runtime: ..., image: ...}`",
        "hill:old: scheduler 'pbs' is not served; the partition was left out",
    ]


def test_loops_over_systems_are_followed_and_calls_that_change_them_are_named(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text(
        "from site_defaults import complete\n"
        "site_configuration = {'systems': [{'name': 'a', 'partitions': [{'name': 'x'}, {'name': 'y'}]}]}\n"
        "for system in site_configuration['systems']:\n"
        "    for partition in system['partitions']:\n"
        "        partition.update({'scheduler': 'slurm', 'launcher': 'srun'})\n"
        "complete(site_configuration)\n"
    )
    converted = reframe_settings.convert(reframe_settings.read_settings(path))
    assert converted.partitions == 2
    assert converted.unread == ["line 6: complete(site_configuration)"]
    assert converted.text().startswith(
        "# what needs a person:\n# the settings were read, not run; compare by hand "
    )


def test_systems_of_one_name_are_distinguished():
    """This machine is `local`; ReFrame's own configuration has a system of that name, too."""
    one = {"name": "local", "partitions": [{"name": "x", "scheduler": "local", "launcher": "local"}]}
    converted = reframe_settings.convert(reframe_settings.Settings([one, one], []))
    assert [*converted.systems] == ["local-2", "local-3"]
    assert "# local-2: another system is called local; tests must name this one local-2\n" in converted.text()


def test_a_partition_that_is_left_out_is_named_even_where_its_system_has_no_other():
    one = {"name": "a", "partitions": [{"name": "x", "scheduler": "flux\n  injected: true"}]}
    converted = reframe_settings.convert(reframe_settings.Settings([one], []))
    assert converted.text() == (
        "# what needs a person:\n# a:x: scheduler 'flux\\n injected: true' is not served; the partition was left out\n"
    )


def test_the_file_that_init_writes_is_valid_and_holds_the_questions(settings, tmp_path, mlhpc, monkeypatch):
    said = mlhpc("init", tmp_path / "new", "--from-reframe", settings).out
    assert "1 system with 3 partitions taken over; what needs a person:\n  hill:login: " in said
    monkeypatch.chdir(tmp_path / "new")
    assert "2 systems" in mlhpc("systems", "check").out
    text = (tmp_path / "new" / "systems.yaml").read_text()
    assert "  # hill:old: scheduler 'pbs' is not served; the partition was left out\n" in text
    assert {"local", "hill"} == set(yaml.safe_load(text)["systems"])
    assert (
        "systems.yaml is there already: no system was taken over\n1 system with"
        in mlhpc("init", ".", "--from-reframe", settings).out
    )


def test_what_reframe_prints_of_its_settings_is_taken_as_well(settings, tmp_path):
    """``--show-config`` prints one system as JSON, ``--show-config=systems`` its list alone; ReFrame reads YAML, too."""
    read = reframe_settings.read_settings(settings)
    whole = {"systems": read.systems, "environments": read.environments, "general": [{}]}
    (tmp_path / "hill.json").write_text(json.dumps(whole))
    (tmp_path / "hill.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(whole))))
    (tmp_path / "systems.json").write_text(json.dumps(read.systems))
    for name in ("hill.json", "hill.yaml", "systems.json"):
        assert reframe_settings.convert(reframe_settings.read_settings(tmp_path / name)).partitions == 3


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("no.py", None, "there is no file"),
        ("bad.py", "x = (", "bad.py is not Python 3: line 1: '(' was never closed"),
        ("void.py", "", "void.py defines no site_configuration: it is no settings file of ReFrame 4"),
        ("none.py", "x = 1", "none.py defines no site_configuration: it is no settings file of ReFrame 4"),
        (
            "empty.py",
            "site_configuration = {}",
            "describes no systems: it is no site configuration of ReFrame 4",
        ),
        (
            "made.py",
            "site_configuration = make()",
            "reframe -C {path} --system NAME --show-config > NAME.json; give that",
        ),
        (
            "made.py",
            "site_configuration = {'systems': make()}",
            "the systems are made by `make()`. The file is read, not run",
        ),
        (
            "glob.py",
            "site_configuration = {}\nfor one in glob():\n    site_configuration.update(one)",
            "the systems are made by statements: line 2: for one in glob():",
        ),
        (
            "grown.py",
            "x = [1]\n" + "x = [x, x]\n" * 60 + "site_configuration = {'systems': x}",
            "holds more values than",
        ),
        ("bad.yaml", "a: [", "bad.yaml cannot be read"),
        ("bad.json", "{", "bad.json cannot be read: Expecting property name"),
        ("deep.json", "[" * 100_000, "deep.json cannot be read"),
        ("list.json", "[1, 2]", "it describes no systems"),
        ("huge.json", " " * (5 << 20), "huge.json has more than 4 MiB; it is no site configuration"),
    ],
)
def test_a_file_that_describes_no_site_is_refused(tmp_path, name, content, text):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as caught:
        reframe_settings.read_settings(path)
    assert text.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    "value", ["text", 7, None, [], {}, ["x", 1], {"a": 1}, [{"name": "x"}], True], ids=repr
)
def test_parts_of_any_other_form_are_left_out_without_a_traceback(value, tmp_path):
    """What JSON may hold in the place of each list, mapping and text of a partition."""
    keys = (
        "name",
        "scheduler",
        "launcher",
        "access",
        "environs",
        "resources",
        "features",
        "devices",
        "processor",
    )
    keys += ("container_platforms", "max_jobs", "time_limit", "modules", "env_vars", "prepare_cmds")
    base = {"name": "x", "scheduler": "slurm", "launcher": "srun", "environs": ["e"]}
    partitions = [{**base, key: value} for key in keys]
    settings = {
        "systems": [{"name": f"s{number}", "partitions": [one]} for number, one in enumerate(partitions)]
    }
    settings["environments"] = [{**dict.fromkeys(keys, value), "name": "e", "target_systems": value}]
    path = tmp_path / "settings.json"
    path.write_text(
        json.dumps({**settings, "systems": [*settings["systems"], {"name": value, "partitions": value}]})
    )
    converted = reframe_settings.convert(reframe_settings.read_settings(path))
    assert converted.partitions >= len(keys) - 1
    (tmp_path / "systems.yaml").write_text(with_systems(converted.text()))
    schedulers = dict(ChainMap(*make_manager().hook.mlhpc_schedulers()))
    found = load_systems(tmp_path / "systems.yaml", schedulers=schedulers, environ={})
    assert found.entries.keys() >= {"s2", "s14"}
