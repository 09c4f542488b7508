"""One rank of one base model: ``python -m pytest_mlhpc.node.worker.bagging.child FD``, started by ``process.py``.

It is a training like any other (``node/worker/rank.py``) on a group of its own, which has the base model's ranks and nobody else.
Afterwards it asks its model for its share of the samples that were held out.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, NoReturn, Optional

import torch
import torch.distributed as dist

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.node.worker import prepare, rank
from pytest_mlhpc.node.worker.accelerators.base import Accelerator, open_device
from pytest_mlhpc.node.worker.bagging import ensemble
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.main import leave, name_failure

#: Exit code of a child whose rank went away: EX_UNAVAILABLE of sysexits.h (4.3BSD).
_RANK_GONE = 69


@dataclass(frozen=True)
class ChildJob:
    """What a child is to do: ``run`` is the base model's own, on its ranks alone."""

    run: RunPlan
    model: int
    place: int
    local_rank: int
    threads: int
    directory: str


class Teller:
    """The child's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, kind: str, body: Any = None, tensors: Any = None) -> None:
        """Send one message, with tensors behind it. A rank that has gone is nobody to tell."""
        file = io.BytesIO()
        if tensors is not None:
            torch.save(tensors, file)
        head = json.dumps({"kind": kind, "body": body, "bytes": file.tell()}).encode() + b"\n"
        left = memoryview(head + file.getvalue())
        while left:
            left = left[os.write(self._fd, left) :]


class ChildOrders:
    """What the rank says after the job: ``go``. At its end, the rank has gone and this process ends."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self.go = threading.Event()
        threading.Thread(target=self._listen, name="mlhpc-bagging", daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            if line.strip() == b"go":
                self.go.set()
        os._exit(_RANK_GONE)


def job_of(
    run: RunPlan, models: int, place: ensemble.BaseModelPlace, local_rank: int, directory: Path
) -> ChildJob:
    """Return the job of one rank of one base model: its share of the batch, and a seed of its own."""
    seed, batch = int(run.parameters.get("seed") or 0), run.parameters.get("global_batch")
    own = {
        **{name: value for name, value in run.parameters.items() if name != "bagging"},
        "seed": ensemble.seed_of(seed, place.model),
    }
    if batch:
        own["global_batch"] = int(batch) // models
    plan = dataclasses.replace(run, parameters=own, ranks=run.ranks // models)
    return ChildJob(plan, place.model, place.place, local_rank, torch.get_num_threads(), str(directory))


def main() -> NoReturn:
    """Train, tell, and end the process."""
    teller = Teller(int(sys.argv[1]))
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(_RANK_GONE)
    orders = ChildOrders(sys.stdin.buffer)
    code = 0
    try:
        said = json.loads(line)
        _train(from_json(ChildJob, said["job"]), int(said["seed"]), teller, orders)
    # Whatever it is, the rank must learn of it, by name.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        teller.say("failed", name_failure(error))
        code = 1
    leave(code)


def _train(job: ChildJob, data_seed: int, teller: Teller, orders: ChildOrders) -> None:
    run = job.run
    torch.set_num_threads(job.threads)
    accelerator = open_device(run.device_type, job.local_rank)
    group = Group(job.place, job.local_rank, run.ranks)
    join(job, group, accelerator, os.environ)
    task = prepare.load_task(run)
    score = ensemble.score_of(task)
    sizes = prepare.split_batch(run, group.world)
    steps = prepare.DEVICE_BATCHES if run.data_source == "device" else run.steps + run.warmup_steps
    share = ensemble.held_out_of_a_rank(score, group.world, sizes.step_samples * steps)
    held_out = share * group.world
    used: Optional[ensemble.BootstrapSampler] = None
    asked: Any = None

    def sampler(length: int, place: int, world: int) -> ensemble.BootstrapSampler:
        nonlocal used, asked
        parted = ensemble.part(length, held_out, data_seed)
        used = ensemble.BootstrapSampler(parted.drawn_from, place, world, data_seed, job.model)
        asked = parted.held_out[place::world].tolist()
        return used

    def begin() -> None:
        teller.say("ready")
        orders.go.wait()

    trained = rank.train(
        run,
        group,
        accelerator,
        Path(job.directory),
        _teller_of_progress(teller),
        draw=prepare.Draw(data_seed, held_out, sampler),
        begin=begin,
    )
    told = ensemble.predictions(trained.trainer, score, trained.data.source.dataset, asked, sizes.micro)
    if not bool(torch.isfinite(told[0]).all()):
        raise WorkerFailure(
            "loss_nan", "the trained model predicts NaN or infinity; look at precision and learning rate"
        )
    teller.say("predictions", {"distinct": used.distinct if used is not None else 0.0}, told)
    teller.say("report", to_json(trained.report))


def _teller_of_progress(teller: Teller) -> Callable[[int, int, float], None]:
    return lambda step, steps, rate: teller.say("progress", [step, steps, rate])


def join(job: ChildJob, group: Group, accelerator: Accelerator, environ: Mapping[str, str]) -> None:
    """Join the base model's own process group; nothing to do for a single rank.

    The ranks meet at the store of the run, which lives in a process that trains nothing.
    """
    if group.world == 1:
        return
    timeout = dt.timedelta(seconds=job.run.time_limit_s)
    place = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    torch_distributed: Any = dist  # whose stores have no types
    store = torch_distributed.TCPStore(*place, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        accelerator.backend,
        store=torch_distributed.PrefixStore(f"bagging/{job.model}", store),
        rank=group.rank,
        world_size=group.world,
        timeout=timeout,
    )


if __name__ == "__main__":
    main()
