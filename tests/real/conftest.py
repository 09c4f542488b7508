"""Tests against real servers: started when the first test asks, shared, and looked after each test."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gridengine_service import FIXTURES as GRIDENGINE_FIXTURES
from gridengine_service import clean_gridengine, gridengine, own_gridengine
from kubernetes_service import (
    Kubernetes,
    end_kubernetes,
    given_kubernetes,
    private_kubernetes,
    share_kubernetes,
)
from kubernetes_service import clear_away as clear_kubernetes_away
from running_suites import Suite
from services import (
    Slurm,
    clear_away,
    clear_strays,
    end_slurm,
    given_slurm,
    needs,
    required,
    share_slurm,
    start_slurm,
)

__all__ = ["clean_gridengine", "gridengine", "own_gridengine"]
_FIXTURES = {"slurm", "own_slurm", "start_own_slurm"}
_KUBERNETES_FIXTURES = {"kubernetes", "namespace", "own_kubernetes", "start_own_kubernetes"}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slurm_versions"):
            item.add_marker(pytest.mark.slow)
        if (_FIXTURES | _KUBERNETES_FIXTURES | GRIDENGINE_FIXTURES).intersection(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.servers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave the shared Kubernetes before a test that does not use it: its daemons need a fifth of a core."""
    yield
    if nextitem is not None and not uses_shared_kubernetes(nextitem):
        for fixture in item.session._fixturemanager.getfixturedefs("kubernetes", item) or ():
            if fixture.cached_result is not None:
                fixture.finish(item._request)


def uses_shared_kubernetes(item: pytest.Item) -> bool:
    """Return whether a test uses the cluster of all workers, by itself or for its namespace."""
    names = set(getattr(item, "fixturenames", ()))
    return "kubernetes" in names or (
        "namespace" in names and not names & {"own_kubernetes", "start_own_kubernetes"}
    )


@pytest.fixture
def make_suite_of(tmp_path: Path, state_dir: Path) -> Iterator[Callable[..., Suite]]:
    """Make suites of a class on a cluster; all share the test's state directory unless told otherwise."""
    made: list[Suite] = []

    def make(
        kind: Callable[..., Suite],
        *cluster: object,
        folder: str = "suite",
        state: Path | None = None,
        **options: object,
    ) -> Suite:
        suite = kind(*cluster, tmp_path / folder, state or state_dir)
        suite.partition(**options)  # type: ignore[attr-defined]  # each class has its own
        made.append(suite)
        return suite

    yield make
    for suite in made:
        suite.close()


@pytest.fixture(scope="session", autouse=True)
def clusters_end_with_this_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no cluster outlive this run of pytest, also one that a test starts for good and then fails."""
    workers = hasattr(request.config, "workerinput")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLHPC_CLUSTER_ENDS_WITH", str(os.getppid() if workers else os.getpid()))
        yield


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """One cluster with slurmdbd for the whole session, shared by all workers; not to be broken (see own_slurm)."""
    if (given := given_slurm(os.environ)) is not None:
        yield given
        return
    yield from share_slurm(request.config)


@pytest.fixture
def slurm_release() -> tuple[str, ...]:
    """Options of `ci/slurm up` that choose the release of Slurm; test modules may override it (and `slurm`)."""
    return ()


@pytest.fixture
def start_own_slurm(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, slurm_release: tuple[str, ...]
) -> Iterator[Callable[..., Slurm]]:
    """Start private clusters: `start_own_slurm("--accounting", "dbd")`, options as of `ci/slurm up`."""
    started: list[Slurm] = []
    install = bool(slurm_release) or "slurm" in required(request.config)
    ending = contextlib.ExitStack()

    def start(*options: str) -> Slurm:
        if "v1" in options:
            ending.enter_context(_only_cgroups())
        options = (*options, *slurm_release)
        directory = Path(tempfile.mkdtemp(prefix="mlhpc-slurm-"))
        directory.chmod(0o755)  # jobs of other users read the configuration
        cluster = needs(
            request.config, "slurm", lambda: start_slurm(directory, *options, private=True, install=install)
        )
        started.append(cluster)
        ending.callback(end_slurm, cluster)
        _enter(cluster, monkeypatch)
        return cluster

    start.started = started  # type: ignore[attr-defined]  # for clean_slurm alone
    with ending:  # each, whatever becomes of the others
        yield start


@contextlib.contextmanager
def _only_cgroups() -> Iterator[None]:
    """Wait until no other test has a cluster with `--cgroup v1`: both would own the cgroups of node1."""
    # Cgroups are one machine's, whatever TMPDIR says to each run of tests.
    path = Path("/tmp") / f"mlhpc-slurm-cgroups-{os.geteuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
def own_slurm(start_own_slurm: Callable[..., Slurm]) -> Slurm:
    """A cluster of this test alone, which it may break; sacct works with -c (jobcomp/filetxt)."""
    return start_own_slurm("--accounting", "filetxt")


@pytest.fixture(autouse=True)
def clean_slurm(
    request: pytest.FixtureRequest, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves a job, a step daemon, a process of a job, or a broken node; clear it away for the next."""
    used = _FIXTURES.intersection(request.fixturenames)
    cookie = os.environ["MLHPC_TEST"]
    folders = [tmp_path]
    if "pytester" in request.fixturenames:
        folders.append(request.getfixturevalue("pytester").path)
    shared = request.getfixturevalue("slurm") if "slurm" in used else None
    own = request.getfixturevalue("start_own_slurm") if used - {"slurm"} else None
    if shared is not None:
        _enter(shared, monkeypatch)
    yield
    clusters = [*([shared] if shared else []), *(own.started if own else [])]
    left = [line for cluster in clusters for line in clear_away(cluster, cookie, folders)]
    left += clear_strays(cookie) if clusters else []
    assert not left, "the test left on Slurm: " + "; ".join(left)


def _enter(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that the test starts use this cluster, and mark its jobs: a workload key is the one thing that
    Slurm takes from the environment of sbatch, salloc and srun alike and shows in its queue."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("SBATCH_WCKEY", "SALLOC_WCKEY", "SLURM_WCKEY"):
        monkeypatch.setenv(name, os.environ["MLHPC_TEST"])


# --- Kubernetes


@pytest.fixture(scope="session")
def kubernetes(request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """One cluster with two nodes (four pretended GPUs each) for the whole session, shared by all workers; not to be broken."""
    if (given := given_kubernetes(os.environ)) is not None:
        yield given
        return
    yield from share_kubernetes(request.config)


@pytest.fixture
def start_own_kubernetes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Kubernetes]]:
    """Start private clusters: `start_own_kubernetes("--nodes", "2")`, options as of `ci/kubernetes up`."""
    started: list[Kubernetes] = []
    ending = contextlib.ExitStack()

    def start(*options: str) -> Kubernetes:
        cluster = private_kubernetes(request.config, *options)
        started.append(cluster)
        ending.callback(end_kubernetes, cluster)
        _enter_kubernetes(cluster, monkeypatch)
        return cluster

    start.started = started  # type: ignore[attr-defined]  # for clean_kubernetes alone
    with ending:  # each, whatever becomes of the others
        yield start


@pytest.fixture
def own_kubernetes(start_own_kubernetes: Callable[..., Kubernetes]) -> Kubernetes:
    """A cluster of one node, of this test alone, which it may break."""
    return start_own_kubernetes()


@pytest.fixture
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A namespace of this test alone, in its own cluster if it asks for own_kubernetes, else in the shared one."""
    own = "own_kubernetes" in request.fixturenames
    cluster: Kubernetes = request.getfixturevalue("own_kubernetes" if own else "kubernetes")
    name = cluster.make_namespace()
    monkeypatch.setenv("MLHPC_TEST_NAMESPACE", name)
    yield name
    if not own:  # the other one goes down, namespaces and all
        cluster.delete_namespace(name)


@pytest.fixture(autouse=True)
def clean_kubernetes(
    request: pytest.FixtureRequest, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves an object with our label in its namespace, or anywhere in a cluster of its own."""
    used = _KUBERNETES_FIXTURES.intersection(request.fixturenames)
    own = (
        request.getfixturevalue("start_own_kubernetes")
        if used & {"own_kubernetes", "start_own_kubernetes"}
        else None
    )
    shared = request.getfixturevalue("kubernetes") if "kubernetes" in used or (used and own is None) else None
    if shared is not None:
        _enter_kubernetes(shared, monkeypatch)
    if "own_kubernetes" in used:
        request.getfixturevalue("own_kubernetes")  # before its namespace
    named = [request.getfixturevalue("namespace")] if "namespace" in used else []
    yield
    left = clear_kubernetes_away(shared, named) if shared is not None else []
    for cluster in own.started if own else []:
        left += clear_kubernetes_away(cluster, [])
    assert not left, "the test left on Kubernetes: " + "; ".join(left)


def _enter_kubernetes(cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that the test starts use this cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
