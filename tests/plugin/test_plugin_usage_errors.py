"""What cannot be run is refused as a whole: all problems at once, exit code 4, no traceback, nothing started."""

import pwd

import pytest
from inner_sessions import ONE_JOB, Suite, cases, output

REFUSALS = cases("refusals.yaml")

#: A test file that says whether it was imported.
IMPORTED = "pathlib.Path('imported').touch()\n"

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 5)}]" for n in range(1, 30))]
)

KUBERNETES = """
@job(kubernetes={"imge": "torch"}, judge=False)
def test_it(run): assert run["rate"].value == 4.0
"""


def contents(suite: Suite) -> dict[str, bytes]:
    """Return the files of the suite, but for pytest's own cache."""
    files = [path for path in suite.folder.rglob("*") if path.is_file() and ".pytest_cache" not in path.parts]
    return {str(path.relative_to(suite.folder)): path.read_bytes() for path in files}


def assert_refused(suite: Suite, result: pytest.RunResult, *texts: str) -> None:
    """Assert that a session ended as a usage error that says each text once, and wrote nothing."""
    printed = output(result)
    assert result.ret == 4, printed
    assert [printed.count(text) for text in texts] == [1] * len(texts), printed
    assert "Traceback" not in printed
    assert "INTERNALERROR" not in printed
    assert suite.nothing_was_written()


def test_a_folder_of_an_option_that_moves_pytests_root_is_refused_as_benchmarks_would_get_other_names(suite):
    suite.write(ONE_JOB)
    (suite.folder / "pytest.ini").unlink()
    outside = suite.folder.parent / "outside"
    outside.mkdir()
    result = suite.run("test_suite.py", "--mlhpc-state", str(outside))
    assert_refused(suite, result, f"write --mlhpc-state={outside}")
    suite.run("test_suite.py", f"--mlhpc-state={outside}").expect(0, passed=1)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_run_is_refused_and_named(suite, monkeypatch, name):
    for variable in ("MLHPC_INFLUX_URL", "SLURM_JOB_ID", "MY_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    case = REFUSALS[name]
    suite.write(case.get("tests", IMPORTED))
    for file, text in case.get("files", {}).items():
        suite.file(file, text)
    before = contents(suite)
    result = suite.run(*case.get("options", "").split(), system=case.get("system", "local"))
    assert_refused(suite, result, *case["printed"])
    assert contents(suite) == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xfe\xff", "systems.yaml:1: byte 0xfe is not UTF-8"),
        (BOMB.encode(), "values with its aliases written out"),
        (b"#" * 50_000_000, "50,000,000 bytes"),
    ],
    ids=["another encoding", "a bomb of aliases", "a large file"],
)
def test_a_hostile_systems_file_is_refused(suite, content, text):
    (suite.folder / "systems.yaml").write_bytes(content)
    suite.write(IMPORTED)
    assert_refused(suite, suite.run(), text)
    assert not (suite.folder / "imported").exists()


#: A system of Slurm's, and its programs: what `scontrol show config` says is tried.
SLURM = """
schema: 1
systems:
  cluster:
    description: a cluster
    partitions:
      part: {scheduler: slurm, launcher: srun, accelerator: cpu, nodes: {cores: 4, memory: 4GiB}, slurm: {partition: cpu}, environments: {default: {python: python3}}}
"""
NAMED = "echo ClusterName = own"
NO_CONFIGURATION = "echo 'scontrol: error: fetch_config: DNS SRV lookup failed' >&2; exit 1"
DAMAGED = "echo 'scontrol: fatal: Unable to process configuration file' >&2; exit 1"
CLUSTER_OF_CONF = "in the environment cannot be followed: jobs go to the cluster of slurm.conf alone"


@pytest.fixture
def slurm(suite, tmp_path, monkeypatch):
    """Make this machine one where a Slurm is installed; none of its programs submits anything."""

    def install(scontrol: str, without: tuple[str, ...] = (), **variables: str) -> None:
        suite.file("systems.yaml", SLURM)
        suite.write(ONE_JOB)
        (tmp_path / "bin").mkdir()
        for name in {"sbatch", "squeue", "scancel", "scontrol", "git"} - set(without):
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/sh\n{scontrol if name == 'scontrol' else 'exit 1'}\n")
            path.chmod(0o755)
        for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**variables, "PATH": f"{tmp_path}/bin"}.items():
            monkeypatch.setenv(name, value)

    return install


@pytest.mark.parametrize("options", [(), ("--mlhpc-resume",)], ids=["submitting", "resuming"])
@pytest.mark.parametrize(
    ("installed", "texts"),
    [
        ((NAMED, ("sbatch", "squeue"), {}), ("cluster:part: Slurm's sbatch, squeue cannot be found on PATH (", "load Slurm's module")),
        ((NAMED, (), {"SLURM_CONF": "/missing/slurm.conf"}), ("Slurm's configuration /missing/slurm.conf (SLURM_CONF) cannot be read: No such file",)),
        ((NO_CONFIGURATION, (), {}), ("DNS SRV lookup failed (exit code 1 of scontrol show config); Slurm's programs find no configuration", "login node; nothing was submitted")),
        ((DAMAGED, (), {}), ("Unable to process configuration file (exit code 1 of scontrol show config); Slurm's programs",)),
        ((NAMED, (), {"SLURM_CLUSTERS": "other"}), (f"SLURM_CLUSTERS=other {CLUSTER_OF_CONF}",)),
        ((NAMED, (), {"SBATCH_CLUSTERS": "own,other"}), (f"SBATCH_CLUSTERS=own,other {CLUSTER_OF_CONF}",)),
    ],
    ids=["no program", "no file", "no configuration", "a damaged one", "another cluster", "several clusters"],
)  # fmt: skip
def test_a_slurm_that_no_waiting_brings_is_refused_before_anything_is_written_down(
    suite, slurm, installed, texts, options
):
    scontrol, without, variables = installed
    slurm(scontrol, without, **variables)
    assert_refused(suite, suite.run(*options, system="cluster"), *texts)


def test_ones_own_cluster_may_be_named_and_defaults_of_sbatch_that_have_no_effect_are(suite, slurm):
    slurm(NAMED, SLURM_CLUSTERS="own", SBATCH_ACCOUNT="z04", SBATCH_QOS="short", SBATCH_WCKEY="x")
    result = suite.run("--mlhpc-resume", system="cluster")
    result.stdout.fnmatch_lines(
        ["SBATCH_ACCOUNT, SBATCH_QOS: not used, as jobs are what systems.yaml says; *"]
    )


def test_a_damaged_baseline_file_is_named_and_left_as_it_is(suite):
    suite.write(ONE_JOB)
    (suite.folder / "baselines").mkdir()
    damaged = suite.file("baselines/local.yaml", "schema: 1\nsystem: local\nentries: [\n")
    assert_refused(suite, suite.run(), "local.yaml:")
    assert damaged.read_text() == "schema: 1\nsystem: local\nentries: [\n"


@pytest.mark.parametrize("name", ["", "../../x", "$(touch pwned)", "a;b", "'\\\"", "ünïcode"])
def test_odd_names_do_no_harm(suite, name):
    suite.write(f"""
    @job(name="{name}")
    def test_it(run, baseline): assert run >= baseline
    """)
    suite.run().assert_outcomes(passed=1)
    suite.run().assert_outcomes(passed=1)
    assert not list(suite.folder.rglob("pwned"))
    assert not (suite.state.parent / "x").exists()


def test_options_of_another_scheduler_are_ignored_where_it_is_not(suite):
    suite.write(KUBERNETES)
    assert suite.run().ret == 0
    (record,) = suite.records()
    assert "kubernetes" not in record["asked"]


def test_a_state_directory_that_cannot_be_is_refused(suite):
    suite.write(ONE_JOB)
    result = suite.run("--mlhpc-state=/dev/null/state")
    assert_refused(
        suite, result, "/dev/null/state cannot be used: /dev/null is no folder; choose another one"
    )


def test_only_who_runs_benchmarks_needs_a_home(suite, monkeypatch):
    def unknown(_uid):
        raise KeyError

    suite.write(ONE_JOB)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "MLHPC_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    suite.run(system="").expect(0, skipped=1)
    assert_refused(suite, suite.run(), "there is no folder for the state: HOME is not set")
