"""The image of the Dockerfile: built for real, looked at, run by podman and by the real Kubernetes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes_service import Kubernetes
from running_suites import Suite, text_of
from services import UNFIT, MissingServiceError, command, needs, required

pytestmark = [pytest.mark.slow, pytest.mark.servers]

#: Nobody: not the user that the image names.
NOBODY = "65534"
PROGRAM = (
    "import os, torch, pytest_mlhpc; print(os.getuid(), torch.ones(3).sum().item(), pytest_mlhpc.__file__)"
)
WRITES = "for place in / /etc /opt/mlhpc /tmp; do touch $place/file 2>/dev/null && echo $place; done; true"


@dataclass(frozen=True)
class Image:
    """What `ci/image build` left in a directory."""

    directory: Path

    def control(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run `ci/image`: a command, then what goes behind its --directory."""
        return command("image", name, "--directory", self.directory, *more)

    def said(self, *words: str) -> str:
        """Return what a command of `ci/image` prints."""
        done = self.control(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *words: str) -> list[str]:
        """Return what a program prints in a container as nobody, whose root file system is read-only."""
        return self.said("run", "--user", NOBODY, "--", *words).split()

    def facts(self) -> dict[str, Any]:
        """Return its configuration, history and size."""
        (found,) = json.loads(self.said("inspect"))
        return dict(found)


@pytest.fixture
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """An image built for this test, or the one in the directory that MLHPC_TEST_IMAGE names."""
    given = os.environ.get("MLHPC_TEST_IMAGE")
    if given:
        yield Image(Path(given))
        return
    with tempfile.TemporaryDirectory(prefix="mlhpc-image-") as folder:
        made = Image(Path(folder, "store"))

        def build() -> Image:
            install = () if "image" in required(request.config) else ("--no-install",)
            done = made.control("build", *install)
            if done.returncode == UNFIT:
                raise MissingServiceError(done.stderr.strip())
            assert done.returncode == 0, done.stderr[-5000:]
            return made

        try:
            yield needs(request.config, "image", build)
        finally:
            assert made.control("clean").returncode in {0, UNFIT}


@pytest.fixture
def cluster_suite(namespace: str, tmp_path: Path, state_dir: Path) -> Iterator[Suite]:
    """A suite of two tests whose pods are of the image."""
    suite = Suite(tmp_path / "suite", state_dir)
    systems = text_of(__file__, "image_systems.yaml", NAMESPACE=namespace)
    (suite.folder / "systems.yaml").write_text(systems)
    suite.tests(text_of(__file__, "image_tests.py.txt"))
    yield suite
    suite.close()


# One test: a build takes minutes, and each worker of pytest-xdist would do it.
def test_the_image_is_built_and_runs_as_anybody_in_pods_that_mount_nothing_of_the_host(
    image: Image, cluster_suite: Suite, kubernetes: Kubernetes, subtests: pytest.Subtests
) -> None:
    facts = image.facts()
    sys.stdout.write(f"the image has {facts['Size'] / 1e6:.0f} MB\n")
    with subtests.test("its user is a number, and none is root"):
        assert facts["Config"]["User"] == "10001:10001"
    with subtests.test("pods say what they run"):
        assert not facts["Config"].get("Entrypoint")
    with subtests.test("no address, and nothing of pip's configuration, is in what it says of itself"):
        reported = json.dumps([facts["Config"], facts["History"]])
        assert [word for word in ("://", "index", "wheels", "secret") if word in reported] == []
    with subtests.test("torch and the package run as nobody"):
        user, total, file = image.run("python", "-c", PROGRAM)
        assert (user, total) == (NOBODY, "3.0")
        assert file.startswith("/opt/mlhpc/")
    with subtests.test("only /tmp can be written"):
        assert image.run("sh", "-c", WRITES) == ["/tmp"]
    with subtests.test("the command is on the path"):
        assert image.run("mlhpc", "--version")[0] == "pytest-mlhpc"
    with subtests.test("a pod's check of its node finds torch"):
        answer = json.loads(
            "".join(image.run("python", "-m", "pytest_mlhpc.node.batch.probe", "--answers", "1"))
        )
        assert answer["torch"].startswith("2.")
    with subtests.test("neither caches nor sources are in it"):
        found = "find / -xdev \\( -path '*/pip/http*' -o -path /src -o -path '/var/lib/apt/lists/?*' \\) 2>/dev/null; true"
        assert image.run("sh", "-c", found) == []
    with subtests.test("a suite runs in restricted pods of it"):
        assert kubernetes.directory is not None, "images are loaded into clusters of ci/kubernetes alone"
        image.said("load", "--kubernetes", str(kubernetes.directory))
        cluster_suite.run().expect(0, passed=2)
