"""A real Slurm of its own for benchmarks (``ci/slurm``), commands that count how often they are called, and sessions on it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import packed_training

ROOT = Path(__file__).resolve().parents[1]
CONFTESTS = Path(__file__).with_name("slurm_conftests")

#: Exit code of `ci/slurm up` for "not on this machine".
UNFIT = 4

#: What counts as a query of the scheduler; and all commands that are counted.
QUERIES = ("squeue", "sacct", "scontrol", "sinfo", "sacctmgr", "sstat")
COUNTED = (*QUERIES, "sbatch", "scancel", "srun", "salloc")

#: Two partitions of the same four nodes: sixteen jobs of a quarter of a node side by side, or all nodes for one job.
#: Commands in jobs are counted as well, hence PATH in `setup`.
SYSTEMS = """
schema: 1
systems:
  bench:
    partitions:
{partitions}
"""
PARTITION = """
      {name}:
        scheduler: slurm
        launcher: {launcher}
        accelerator: cpu
        nodes: {{cores: {cores}, memory: 1000MiB, max: 4}}
        warm: {warm}
        slurm: {{partition: cpu, exclusive: {exclusive}, max_time: 1h, pending_limit: 4h}}
        environments:
          default: {{python: "{python}", setup: 'export PATH="{wrappers}:$PATH" MLHPC_BENCH_COUNTS="{counts}.jobs"'}}
        preset: smoke
        time_limit: 2m
"""


class NotHereError(Exception):
    """No Slurm can run on this machine; the text says what is missing."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended: what it printed, how long it took, CPU seconds of it and its children."""

    printed: str
    wall: float
    cpu: float
    code: int


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up; ``folder`` is ours alone."""

    folder: Path
    environment: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        wrappers = self.folder / "wrappers"
        object.__setattr__(
            self,
            "environment",
            {
                **{name: value for name, value in os.environ.items() if name != "CI"},
                "SLURM_CONF": str(self.folder / "cluster/etc/slurm.conf"),
                "MLHPC_STATE": str(self.folder / "state"),
                "MLHPC_BENCH_COUNTS": str(self.folder / "counts"),
                "PYTEST_ADDOPTS": "",
                "PATH": f"{wrappers}:{os.environ['PATH']}",
            },
        )

    def prepare(self) -> None:
        """Write the counting commands and the systems file."""
        wrappers = self.folder / "wrappers"
        wrappers.mkdir()
        for name in COUNTED:
            real = shutil.which(name)
            if real is None:
                continue
            line = (
                f'printf "{name} %s\\n" "$*" >>"$MLHPC_BENCH_COUNTS"\n'  # one short append: they do not mix
            )
            (wrappers / name).write_text(f'#!/bin/sh\n{line}exec {real} "$@"\n')
            (wrappers / name).chmod(0o755)
        made = [
            PARTITION.format(
                name=name, launcher=launcher, cores=cores, exclusive=exclusive, warm=json.dumps(warm),
                python=sys.executable, wrappers=wrappers, counts=self.folder / "counts",
            )
            for name, launcher, cores, exclusive, warm in (
                ("quarter", "srun", 4, "false", False), ("quarter_plain", "plain", 4, "false", False),
                ("whole", "srun", 16, "true", False),
                *((name, "auto", 2, "true", warm) for name, warm in packed_training.PARTITIONS.items()),
            )
        ]  # fmt: skip
        (self.folder / "systems.yaml").write_text(SYSTEMS.format(partitions="".join(made)))

    def calls(self, suffix: str = "") -> collections.Counter[str]:
        """Return command -> calls since the last :meth:`forget`; with the suffix ``.jobs`` those made within jobs."""
        path = self.folder / f"counts{suffix}"
        lines = path.read_text().splitlines() if path.exists() else []
        return collections.Counter(line.partition(" ")[0] for line in lines)

    def forget(self) -> None:
        """Begin to count again."""
        for suffix in ("", ".jobs"):
            (self.folder / f"counts{suffix}").write_text("")

    def session(
        self, partition: str, suite: str, conftest: str, *options: str, variables: Mapping[str, str]
    ) -> Ended:
        """Run pytest over one suite on *partition* and return how it ended; it gets a folder of its own."""
        where = self.folder / f"suite-{time.monotonic_ns()}"
        where.mkdir()
        (where / "test_suite.py").write_text(suite)
        shutil.copy(CONFTESTS / f"{conftest}.py", where / "conftest.py")
        argv = [sys.executable, "-m", "pytest", "-q", "-ra", "--rootdir", ".", "-p", "no:cacheprovider"]
        argv += ["-p", "no:randomly", "-p", "no:benchmark"]  # tests in their order
        argv += [
            "-o",
            f"mlhpc_systems_file={self.folder / 'systems.yaml'}",
            "--system",
            f"bench:{partition}",
            *options,
        ]
        return self.run(argv, where, variables)

    def run(self, argv: Sequence[str], where: Path, variables: Mapping[str, str] | None = None) -> Ended:
        """Run a command with this cluster in its environment, and wait for its end."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        done = subprocess.run(
            list(argv), cwd=where, env={**self.environment, **(variables or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        wall = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Ended(done.stdout, wall, cpu, done.returncode)

    def slurm(self, *argv: str) -> str:
        """Return what a command of Slurm prints; not counted."""
        path = {**self.environment, "PATH": os.environ["PATH"]}
        return subprocess.run(argv, env=path, capture_output=True, text=True, check=True, timeout=60).stdout

    def idle(self) -> None:
        """Wait until no job is left and all nodes can be used."""
        until = time.monotonic() + 60
        while self.slurm("squeue", "-h") or "idle" not in self.slurm("sinfo", "-h", "-p", "cpu", "-o", "%T"):
            if time.monotonic() > until:
                raise SystemExit(f"jobs are left on the benchmark's Slurm:\n{self.slurm('squeue')}")
            time.sleep(0.2)


@contextlib.contextmanager
def started(folder: Path, accounting: str) -> Iterator[Cluster]:
    """Start a cluster below *folder* for as long as the context lasts, and no longer than this process.

    Raises:
        NotHereError: it cannot run on this machine; with the words of ``ci/slurm``.
        SystemExit: it does not come up.
    """
    where = ["--directory", str(folder / "cluster")]
    script = [sys.executable, str(ROOT / "ci/slurm")]
    words = [*script, "up", "--accounting", accounting, "--for", str(os.getpid()), "--no-install", *where]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == UNFIT:
            raise NotHereError(done.stderr.strip())
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        cluster = Cluster(folder)
        cluster.prepare()
        cluster.forget()
        yield cluster
    finally:
        subprocess.run([*script, "down", "--purge", *where], capture_output=True, check=False, timeout=120)
