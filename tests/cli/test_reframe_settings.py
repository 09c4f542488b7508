"""ReFrame's site configuration as systems.yaml: what is taken over, and what is asked."""

import json
import signal
import subprocess
import sys

import pytest
import yaml

from pytest_mlhpc.cli import from_reframe
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
             "access": ["--partition=standard", "-A z19", "--exclusive", "--hint=nomultithread", "--foo bar", "--time=10",
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
        {"name": "gnu", "modules": ["/opt/gcc"], "target_systems": ["hill:gpu"]},
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
    return from_reframe.convert(from_reframe.read_settings(settings))


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
    }


def test_what_needs_a_person_is_asked_with_its_place(converted):
    assert converted.questions == [
        "hill:login: environment builtin: modules are not loaded on a partition without job script",
        "hill:cpu-nodes: launcher 'site_mpi' is not known; srun was taken",
        "hill:cpu-nodes: nodes: memory of a node (%m of sinfo, in MB); how many nodes a job may have (max)",
        "hill:cpu-nodes: slurm: --time=10: say time_limit",
        "hill:cpu-nodes: slurm: --reservation=UNKNOWN is read by ReFrame; write its value",
        "hill:cpu-nodes: environment gnu: the value of WHO is read by ReFrame; write it",
        "hill:cpu-nodes: environment 'lost' is not described",
        "hill:cpu-nodes: environment lost: the value of WHO is read by ReFrame; write it",
        "hill:gpu: nodes: cores of a node (%c of sinfo); memory of a node (%m of sinfo, in MB); how many nodes a job may have (max)",
        "hill:gpu: resource 'memory' (--mem={size}): a test asks for such by slurm={...}",
        "hill:gpu: containers by Sarus: give an environment `container: {runtime: ..., image: ...}`",
        "hill:old: scheduler 'pbs' is not served; the partition was left out",
    ]


def test_the_file_that_init_writes_is_valid_and_holds_the_questions(settings, tmp_path, mlhpc, monkeypatch):
    said = mlhpc("init", tmp_path / "new", "--from-reframe", settings).out
    assert "1 system with 3 partitions taken over; what needs a person:\n  hill:login: " in said
    monkeypatch.chdir(tmp_path / "new")
    assert "2 systems" in mlhpc("systems", "check").out
    text = (tmp_path / "new" / "systems.yaml").read_text()
    assert "  # hill:old: scheduler 'pbs' is not served; the partition was left out\n" in text
    assert {"local", "hill"} == set(yaml.safe_load(text)["systems"])
    assert (
        "systems.yaml is there already: nothing was taken over"
        in mlhpc("init", ".", "--from-reframe", settings).out
    )


def test_settings_in_yaml_are_read_without_being_run(settings, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(from_reframe.read_settings(settings), default=str))))
    assert from_reframe.convert(from_reframe.read_settings(path)).partitions == 3


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("no.py", None, "there is no file"),
        ("bad.py", "1 / 0", "bad.py cannot be run: ZeroDivisionError: division by zero"),
        ("none.py", "x = 1", "none.py cannot be run: it defines no site_configuration"),
        ("loud.py", "print('hello'); site_configuration = {}", "loud.py prints something of its own"),
        (
            "empty.py",
            "site_configuration = {}",
            "describes no systems: it is no site configuration of ReFrame 4",
        ),
        ("bad.yaml", "a: [", "bad.yaml cannot be read"),
    ],
)
def test_a_file_that_describes_no_site_is_refused(tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        from_reframe.read_settings(tmp_path / name)
    assert text in str(caught.value)


def test_a_file_that_never_ends_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(from_reframe, "LIMIT_S", 0.5)
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(UsageError, match=r"slow.py did not end within 0.5 s"):
        from_reframe.read_settings(tmp_path / "slow.py")
    left = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "slow.py")], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


def test_settings_end_by_themselves_where_who_reads_them_was_killed(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    argv = [sys.executable, "-I", "-c", from_reframe._LOADER, str(tmp_path / "slow.py"), str(tmp_path), "1"]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGALRM
