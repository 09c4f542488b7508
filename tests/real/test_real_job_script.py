"""What a real sbatch makes of the job script: names and folders arrive as they were meant, and nothing else."""

from pathlib import Path

import pytest
from services import Slurm, wait_until

from pytest_mlhpc.config.model import Environment, NodeType, Partition
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.provision.scheduler.script import render_script
from pytest_mlhpc.provision.slurm.script import SLURM

HOSTILE = [
    "a b", " lead and trail ", "it's", 'say "hi"', "ünï 日本", "100% %j %% %x %", "back\\slash \\\\ two", "trail\\",
    "50% \\%", "#hash # x", "$HOME `id` $(id)", "semi;colon & | < > ( )", "--dash=1", "!bang", "*?[x]{a,b}~",
    "x" * 200,
]  # fmt: skip


def submit(slurm: Slurm, folder: Path, name: str, **options: object) -> str:
    """Submit the script of a plan in *folder*, whose interpreter shows what it was given; return the job's id."""
    folder.mkdir(parents=True)
    (folder / "plan.json").touch()
    python = folder / "stub"
    python.write_text(
        '#!/bin/bash\n[ "$1" = -c ] || printf "%s\\n" "$PWD" "$SLURM_JOB_NAME" "$PYTHONPATH" "$@" "${SECRET-none}"\n'
    )
    python.chmod(0o755)
    payload = folder / "p.zip"
    payload.touch()
    environment = Environment("default", str(python))
    run = RunPlan("r", "n", 0, "command", {}, 1, 1, 1, "cpu", "plain", 60.0, 0, 0)
    plan = Plan("a", "", str(folder), 1, 60.0, (run,))
    nodes = NodeType(16, 2**34, 4)
    partition = Partition(
        "s",
        "p",
        "slurm",
        "srun",
        "cpu",
        nodes,
        (environment,),
        scheduler_options={"partition": "cpu", **options},
    )
    lines = str(folder / "lines")
    text = render_script(
        plan, partition, environment, SLURM, name=name, lines_dir=lines, payload=str(payload)
    )
    (folder / "job.sh").write_text(text)
    done = slurm.run("sbatch", "--parsable", folder / "job.sh")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(slurm: Slurm, *ids: str) -> dict[str, tuple[str, str]]:
    """Return id -> state and name once all jobs have ended."""
    assert wait_until(lambda: all(job.ended for job in slurm.jobs() if job.id in ids))
    return {job.id: (job.state, job.name) for job in slurm.jobs() if job.id in ids}


def test_hostile_job_names_and_folders_arrive_as_they_were_meant(slurm: Slurm, tmp_path: Path):
    folders = {name: tmp_path / name / "job" for name in HOSTILE}
    ids = {name: submit(slurm, folder, name) for name, folder in folders.items()}
    found = ended(slurm, *ids.values())
    for name, folder in folders.items():
        assert found[ids[name]] == ("COMPLETED", name)
        assert (folder / "slurm.out").read_text().splitlines() == [
            str(folder), name, f"{folder}/p.zip", "-m", "pytest_mlhpc.node.batch.main", "--lines", f"{folder}/lines",
            f"{folder}/plan.json", "none",
        ]  # fmt: skip


def test_a_job_gets_no_variable_of_the_session(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "token")
    job = submit(slurm, tmp_path / "job", "mlhpc-x")
    ended(slurm, job)
    assert (tmp_path / "job/slurm.out").read_text().splitlines()[-1] == "none"


def test_options_mean_to_slurm_what_they_say(slurm: Slurm, tmp_path: Path):
    job = submit(
        slurm,
        tmp_path / "job",
        "mlhpc-x",
        comment="for 'x' and \"y\"",
        exclude="node[1-2]",
        nodelist="node4",
        memory=2**29,
        exclusive=True,
        sbatch=["--nice=7"],
    )
    shown = slurm.run("scontrol", "-o", "show", "job", job).stdout
    ended(slurm, job)
    for text in (
        "Comment=for 'x' and \"y\"", "ExcNodeList=node[1-2]", "ReqNodeList=node4", "MinMemoryNode=512M", "Nice=7",
        "TimeLimit=00:01:00", "OverSubscribe=NO", "Requeue=0",
    ):  # fmt: skip
        assert text in shown


def test_a_set_up_that_fails_is_reported_by_its_exit_code(slurm: Slurm, tmp_path: Path):
    folder = tmp_path / "job"
    job = submit(slurm, folder, "mlhpc-x")
    (folder / "plan.json").unlink()
    ended(slurm, job)
    again = slurm.run("sbatch", "--parsable", folder / "job.sh").stdout.strip()
    assert ended(slurm, again)[again][0] == "FAILED"
    assert "ExitCode=77:0" in slurm.run("scontrol", "-o", "show", "job", again).stdout
    # Output of a second start of a job is added to what there is.
    assert "cannot read" in (folder / "slurm.out").read_text().splitlines()[-1]
