"""Of this checkout alone: the tests of the plug-in use pytest's own fixture for testing plug-ins."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest_plugins = ["pytester"]

SERVICES = (
    "slurm", "kubernetes", "image", "influxdb", "alertmanager", "smtp", "sink", "chromium", "gitlab-ci-local",
    "grafana-schema", "flux", "sshd", "gridengine",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which real servers must be there: tests/real/ skips what it cannot start."""
    parser.addoption(
        "--require-services",
        metavar="NAME[,NAME...]",
        default="",
        help="fail, do not skip, tests whose real server cannot run here: " + ", ".join(SERVICES),
    )
    parser.addoption("--cpu", type=int, metavar="N", help="list the N tests that took the most CPU seconds")
    parser.addoption(
        "--features",
        metavar="FILE",
        help="note what tests really ran, for docs/state.md (tests/feature_evidence.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a misspelt service: nothing would be required."""
    names = [name.strip() for name in config.getoption("--require-services").split(",") if name.strip()]
    if unknown := [name for name in names if name not in SERVICES]:
        raise pytest.UsageError(
            f"--require-services: no service {unknown[0]!r}; there are {', '.join(SERVICES)}"
        )
    if not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist
        config.pluginmanager.register(_helper("skip_summary").SkipSummary())
    if rows := config.getoption("--cpu"):
        config.pluginmanager.register(_helper("cpu_seconds").Meter(rows))
    if config.getoption("--features"):
        writes = not hasattr(config, "workerinput")  # not in the processes of pytest-xdist
        evidence = _helper("feature_evidence").Evidence(Path(config.getoption("--features")), writes=writes)
        config.pluginmanager.register(evidence)


def _helper(name: str) -> ModuleType:
    """Import a module of tests/ before pytest has put that folder on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"tests/{name}.py")
    assert spec is not None  # noqa: S101 - for people who move the file
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
