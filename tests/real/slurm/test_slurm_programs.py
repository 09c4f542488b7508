"""Where programs start on a real cluster: as on this machine (tests/plugin/test_plugin_programs.py)."""

from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, check_started, write_suite
from program_folders import write_programs


def test_a_program_starts_in_a_new_folder_and_finds_what_lies_next_to_its_test(suite):
    write_programs(suite.folder)
    suite.run("deep", "--mlhpc-pack").expect(0, passed=4)
    assert list(suite.folder.glob("**/made")) == []


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_this_machine(suite):
    write_suite(suite.folder, nodes=2, ranks=2)
    suite.run("test_files.py", "--mlhpc-pack").expect(
        1, *FAILS, *ERRORS, passed=TESTS, failed=len(FAILS), error=WITH_ERRORS
    )
    check_started(suite.records())
    assert len(list(suite.state.glob("builds/*"))) == 2  # one of two runs, and nothing of the one that failed


def test_runs_of_one_allocation_share_a_copy_of_their_files(suite):
    (suite.folder / "input").write_text("rate: 4")
    suite.tests(
        """
@pytest.mark.parametrize("name", ["one", "two", "three"])
@script("cat input", files="input")
def test_it(run, name): pass
"""
    )
    suite.run("--mlhpc-pack").expect(0, passed=3)
    copies = [path for path in suite.state.glob("runs/**/input") if not path.is_symlink()]
    assert len(copies) == 1


def test_options_of_a_test_reach_its_job(suite):
    suite.tests(
        """
@script("echo rate: 4; scontrol show job $SLURM_JOB_ID | grep -o Comment=.*", slurm={"comment": "of a test"})
def test_it(run):
    assert "Comment=of a test" in run.output

@script("echo rate: 4", slurm={"shared_directory": "/tmp"})
def test_of_site(run): pass

@script("echo rate: 4", slurm={"coment": "x"})
def test_misspelt(run): pass

@script("echo rate: 4", modules="no/such-module")
def test_module(run): pass
"""
    )
    result = suite.run()
    result.expect(1, "slurm: shared_directory is the site's to say, in systems.yaml", passed=1, error=3)
    assert "did you mean 'comment'" in result.text
    assert "module no/such-module cannot be loaded" in result.text or "no command module" in result.text


def test_modules_of_a_test_are_loaded_by_its_job(suite):
    suite.partition(setup='module() { export LOADED="$LOADED $2"; }')
    suite.tests(
        """
@script("echo rate: 4; echo has$LOADED", modules=["gcc/14", "openmpi"])
def test_it(run):
    assert "has gcc/14 openmpi" in run.output
"""
    )
    suite.run().expect(0, passed=1)


MAKE = """
test -z "$SLURM_JOB_ID" && echo "echo rate: 4; echo built outside of a job with$LOADED, $1" > tool
"""


def test_a_build_of_the_login_node_is_made_once_before_anything_is_submitted(suite):
    suite.partition(setup='module() { export LOADED="$LOADED $2"; }')
    suite.tests(
        """
from pytest_mlhpc import build

tool = build("sh make.sh 'two words'", files="make.sh", where="login")
broken = build("sh -c 'echo no compiler >&2; exit 3'", where="login")

@pytest.mark.parametrize("number", [1, 2])
@program("sh {tool}/tool", RATE, modules="gcc/14")
def test_it(run, tool, number):
    assert "built outside of a job with gcc/14, two words" in run.output

@program("sh {broken}/tool", RATE)
def test_broken(run, broken): pass
"""
    )
    (suite.folder / "make.sh").write_text(MAKE)
    result = suite.run("--mlhpc-pack")
    result.expect(
        1,
        "build tool is made, ",
        "build_failed: the build broken (sh -c echo no compiler >&2; exit 3): ended with exit code 3",
        "no compiler",
        passed=2,
    )
    assert sorted(result.verdicts()) == ["build_failed", "new", "new"]
    assert len(list(suite.state.glob("builds/*/.complete"))) == 1
    assert "on this machine" not in suite.run("-k", "test_it").text


def test_a_run_that_others_need_is_left_to_a_later_session_with_them(suite):
    suite.tests(
        f"""
from pytest_mlhpc import prepare

made = prepare("sh -c 'sleep 3; echo x >> {suite.folder}/count; echo rate: 4 > made'")

@pytest.mark.parametrize("number", [1, 2])
@program("cat {{made}}/made", RATE)
def test_it(run, made, number):
    assert run.output == (made.folder / "made").read_text()
"""
    )
    suite.run("--mlhpc-wait=0").expect(75, skipped=2)
    suite.run("--mlhpc-pack").expect(0, "going on with 1 run", passed=2)
    assert (suite.folder / "count").read_text() == "x\n"
