"""Which client is chosen, with a real probe of what stands for pyslurm on the module path."""

from __future__ import annotations

import os
import re

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.choose import choose, release, run_probe

GOOD = """
import types
__version__ = "22.5.3"
slurmctld = types.SimpleNamespace(ping_primary=lambda: None)
"""


@pytest.fixture
def environ_with(tmp_path, monkeypatch, command):
    """Put a module pyslurm and a command sinfo where the probe and the client look first; return the environment."""

    def make(module, version="slurm 22.05.8"):
        (tmp_path / "pyslurm.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "pyslurm", raising=False)
        return {**os.environ, **command("sinfo", f"echo '{version}'"), "PYTHONPATH": str(tmp_path)}

    return make


def test_commands_are_used_without_a_look_at_pyslurm(environ_with):
    client, line = choose("cli", environ_with("raise SystemExit(1)"))
    assert (client.name, line) == ("cli", "")


@pytest.mark.parametrize("setting", ["auto", "pyslurm"])
def test_pyslurm_of_the_clusters_release_is_used(environ_with, setting):
    client, line = choose(setting, environ_with(GOOD))
    assert (client.name, line) == ("pyslurm", "slurm: pyslurm 22.5.3 is used")


@pytest.mark.parametrize(
    ("module", "version", "why"),
    [
        ("raise ImportError('libslurm.so is missing')", "slurm 22.05.8", "libslurm.so is missing"),
        ("raise SystemExit(1)", "slurm 22.05.8", "exit code 1"),
        ("import os; os.kill(os.getpid(), 11)", "slurm 22.05.8", "killed by SIGSEGV"),
        (GOOD + "def f(): raise OSError('no controller')\nslurmctld.ping_primary = f", "slurm 22.05.8", "no controller"),
        (GOOD, "slurm-wlm 24.11.5", "pyslurm 22.5.3 is not for Slurm 24.11.5"),
        ("import os; os._exit(0)", "slurm 22.05.8", "its probe said ''"),
        (GOOD, "", "holds no version"),
    ],
)  # fmt: skip
def test_otherwise_auto_says_why_not_and_pyslurm_fails(environ_with, module, version, why):
    environ = environ_with(module, version)
    client, line = choose("auto", environ)
    assert client.name == "cli"
    text = f"slurm: Slurm's commands are used, not pyslurm: .*{re.escape(why)}.*"
    assert re.fullmatch(text, line)  # in one line
    with pytest.raises(UsageError, match=f"'pyslurm' cannot be used.*{re.escape(why)}"):
        choose("pyslurm", environ)


def test_a_probe_that_hangs_is_ended(environ_with):
    probe = run_probe(environ_with("import time; time.sleep(600)"), limit_s=0.2)
    assert probe.trouble.startswith("its probe: no answer within 0.2 s")


def test_an_unknown_setting_is_refused():
    with pytest.raises(UsageError, match="there are cli, auto and pyslurm"):
        choose("rest", {})


@pytest.mark.parametrize(
    ("version", "expected"), [("22.5.3", (22, 5)), ("22.05.8", (22, 5)), ("24.11.0", (24, 11)), ("new", None)]
)
def test_releases_are_compared_as_numbers(version, expected):
    assert release(version) == expected
