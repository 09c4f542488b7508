"""One rank that measures several runs one after the other: importing torch once for each of them would cost more than they do.

``python parallel_ranks.py RUNS FOLDER``: RUNS is a file with a JSON object, name -> run; each rank writes FOLDER/NAME.RANK.json
with its report, or with ``failed``: outcome and text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

#: Seconds for all of them: a quiet core needs twenty, and nothing is gained by giving up early on a busy one.
LIMIT = 1500


def _main(runs: str, folder: str) -> None:
    import torch

    from pytest_mlhpc.batch.plan import RunPlan
    from pytest_mlhpc.results.schema import from_json, to_json
    from pytest_mlhpc.worker import distributed, rank
    from pytest_mlhpc.worker.accelerators.base import open_device
    from pytest_mlhpc.worker.failure import WorkerFailure

    torch.set_num_threads(1)
    group, accelerator = distributed.from_environment(os.environ), open_device("cpu", 0)
    distributed.join(group, accelerator, LIMIT)
    for name, body in json.loads(Path(runs).read_text()).items():
        run = from_json(RunPlan, body)
        try:
            told = to_json(rank.measure(run, group, accelerator, Path(folder), lambda *_: None))
        except WorkerFailure as failure:
            told = {"failed": [failure.outcome, failure.text]}
        Path(folder, f"{name}.{group.rank}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # as a worker's rank: threads of gloo may abort a process that goes in peace


def measured(folder: Path, runs: dict[str, Any], ranks: int, root: Path, port: int) -> dict[str, list[Any]]:
    """Return, for each of *runs*, what its ranks told in order: reports as JSON."""
    from pytest_mlhpc.results.schema import to_json

    (folder / "runs.json").write_text(json.dumps({name: to_json(run) for name, run in runs.items()}))
    common = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1",
              "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder / "runs.json"), str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=LIMIT)[0].decode() for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in started] == [0] * ranks, ended
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        for name in runs
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])
