"""Of this checkout alone: the tests of the plug-in use pytest's own fixture for testing plug-ins."""

import importlib.util
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SERVICES = (
    "slurm", "kubernetes", "image", "influxdb", "alertmanager", "smtp", "sink", "chromium", "gitlab-ci-local",
    "grafana-schema",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which real servers must be there: tests/real/ skips what it cannot start."""
    parser.addoption(
        "--require-services",
        metavar="NAME[,NAME...]",
        default="",
        help="fail, do not skip, tests whose real server cannot run here: " + ", ".join(SERVICES),
    )
    parser.addoption(
        "--features",
        metavar="FILE",
        help="note what tests really ran, for README's table (tests/feature_evidence.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a misspelt service: nothing would be required."""
    names = [name.strip() for name in config.getoption("--require-services").split(",") if name.strip()]
    if unknown := [name for name in names if name not in SERVICES]:
        raise pytest.UsageError(
            f"--require-services: no service {unknown[0]!r}; there are {', '.join(SERVICES)}"
        )
    if config.getoption("--features"):
        path = Path(__file__).parent / "tests/feature_evidence.py"
        spec = importlib.util.spec_from_file_location("feature_evidence", path)
        assert spec is not None  # noqa: S101 - for people who move the file
        assert spec.loader is not None  # noqa: S101
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        writes = not hasattr(config, "workerinput")  # not in the processes of pytest-xdist
        config.pluginmanager.register(module.Evidence(Path(config.getoption("--features")), writes=writes))
