"""Programs with files and artifacts in pods, which see no folder of the tests: as on this machine (tests/plugin/test_plugin_programs.py)."""

import shutil
from pathlib import Path

import pytest
import yaml
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, check_started, write_suite

PROGRAMS = Path(__file__).parents[3] / "suites" / "programs"

pytestmark = pytest.mark.servers


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_this_machine(pod_suite):
    pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
    write_suite(pod_suite.folder, nodes=2, ranks=1)
    pod_suite.run("test_files.py").expect(
        1, *FAILS, *ERRORS, passed=TESTS, failed=len(FAILS), error=WITH_ERRORS
    )
    check_started(pod_suite.records())


def test_programs_of_the_shipped_suite_run_unchanged(pod_suite):
    pod_suite.partition({"features": ["python", "fio", "dd"]})
    shutil.copytree(PROGRAMS, pod_suite.folder / "programs")
    pod_suite.run("programs", "-k", "json_lines or fio or dd").expect(0, passed=3)


LARGE = """
    @pytest.mark.parametrize("number", [1, 2])
    @program("sh -c 'wc -c < large/file; cat small; echo own > made; ls large'", files=["large/", "small"], artifacts=["made"])
    def test_it(run, number):
        assert run.output.split() == [str(3 << 20), "small", "file"]
        assert run.text("made") == "own\\n"
"""


@pytest.fixture
def volume_suite(pod_suite, tmp_path):
    """A suite with files of 3 MiB, and what makes a partition with a volume that this machine sees in the folder returned."""
    folder = tmp_path / "volume"
    folder.mkdir()
    (pod_suite.folder / "large").mkdir()
    (pod_suite.folder / "large" / "file").write_bytes(bytes(3 << 20))
    (pod_suite.folder / "small").write_text("small\n")
    pod_suite.tests(LARGE)

    def see(here):
        volume = {
            "name": "files",
            "host_path": str(folder),
            "mount": "/files",
            "read_only": True,
            "here": str(here),
        }
        pod_suite.partition(kind="pods")
        path = pod_suite.folder / "systems.yaml"
        systems = yaml.safe_load(path.read_text())
        systems["systems"]["cluster"]["partitions"]["part"]["kubernetes"]["volumes"].append(volume)
        path.write_text(yaml.safe_dump(systems))
        return pod_suite

    return see, folder


def test_files_that_are_too_large_for_a_secret_are_found_on_a_volume(volume_suite):
    see, folder = volume_suite
    suite = see(folder)
    for options in ((), ("--mlhpc-pack",)):
        suite.run(*options).expect(0, passed=2)
    (copy,) = (folder / "mlhpc-files").iterdir()
    assert (copy / "large" / "file").stat().st_size == 3 << 20
    (suite.folder / "small").write_text("other\n")
    suite.run("-k", "1").expect(1, "other", failed=1)
    assert len(list((folder / "mlhpc-files").iterdir())) == 2


def test_files_on_a_volume_that_pods_do_not_have_are_named(volume_suite, tmp_path):
    see, _ = volume_suite
    (tmp_path / "elsewhere").mkdir()
    suite = see(tmp_path / "elsewhere")
    suite.run("-k", "1").expect(1, "the files of the tests are not on this volume", error=1)
    see(tmp_path / "nowhere").run("-k", "1").expect(
        1,
        "files: have 3.0MiB, a pod gets 900KiB at most without a volume, and the volume files of",
        "is no folder here",
        error=1,
    )


HELLO = r"""
#include <stdio.h>
#include <unistd.h>

int main(void) {
    char name[256];
    gethostname(name, sizeof name);
    printf("start: 1\nin %s\n", name);
    return 0;
}
"""

COMPILED = """
    from pytest_mlhpc import build

    hello = build("gcc -O2 -o hello hello.c", files=["hello.c"])
    torn = build("gcc -o torn torn.c", files=["*.c"])
    STARTS = Metric("starts", r"start: (\\S+)", "1", better="none", reduce="sum")

    @program("{hello}/hello", STARTS)
    def test_once(run, hello):
        assert run["starts"].value == 1

    @program("{hello}/hello", STARTS, nodes=2, ranks_per_node=2)
    def test_ranks(run, hello):
        assert run["starts"].value == 4
        assert [len({one.output.split()[-1] for one in run.ranks[at:at + 2]}) for at in (0, 2)] == [1, 1]
        assert len({one.output.split()[-1] for one in run.ranks}) == 2

    @program("sh -c 'grep main hello.c; cat folder/data; $HELLO'", nodes=2, ranks_per_node=1, files=["hello.c", "folder/"], env={"HELLO": "{hello}/hello"})
    def test_files_are_in_each_pod(run, hello):
        assert [one.output.splitlines()[:3] for one in run.ranks] == [["int main(void) {", "of the folder", "start: 1"]] * 2

    @program("{torn}/torn", STARTS, nodes=2, ranks_per_node=1)
    def test_torn(run, torn):
        pass
"""


@pytest.mark.parametrize("options", [(), ("--mlhpc-pack",)], ids=["alone", "packed"])
def test_a_c_program_is_compiled_in_each_pod_on_which_it_has_ranks(pod_suite, options):
    pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
    (pod_suite.folder / "hello.c").write_text(HELLO)
    (pod_suite.folder / "torn.c").write_text("int main(void) { return no_such_name; }\n")
    (pod_suite.folder / "folder").mkdir()
    (pod_suite.folder / "folder" / "data").write_text("of the folder\n")
    pod_suite.tests(COMPILED)
    pod_suite.run(*options).expect(
        1,
        "build_failed: the build torn (gcc -o torn torn.c): ended with exit code 1 on mlhpc-",
        "no_such_name",
        passed=3,
        error=1,
    )
