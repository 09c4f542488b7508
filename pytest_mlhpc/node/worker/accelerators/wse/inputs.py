"""What reads the samples of a run: called by name on a cluster's input workers, each of which streams its share."""

from __future__ import annotations

import json
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.accelerators.wse import load
from pytest_mlhpc.node.worker.data.source import ShardedSampler, open_source

_TAKEN = {torch.uint8: torch.int16, torch.int8: torch.int16, torch.int64: torch.int32}


def stream(run_json: str, directory: str) -> DataLoader[Any]:
    """Return the loader of this process for the run in *run_json*: batches (inputs, targets) as stored.

    Elsewhere than on an input worker, all samples are its share: the back-end takes one batch there, to see its shape.
    """
    distributed = load().distributed
    run = from_json(RunPlan, json.loads(run_json), "the run")
    sizes = prepare.split_batch(run, 1)
    batch = int(distributed.get_streaming_batch_size(sizes.step_samples))
    place, places = (
        (distributed.get_streaming_rank(), distributed.num_streamers())
        if distributed.is_streamer()
        else (0, 1)
    )
    seed = int(run.parameters.get("seed") or 0)
    count = sizes.step_samples * (run.steps + run.warmup_steps)
    task = prepare.load_task(run)
    source = open_source(run, task, count=count, seed=seed, directory=directory, again=sizes.step_samples)
    sampler = ShardedSampler(len(source.dataset), place, places, seed, repeat=True)
    return DataLoader(source.dataset, batch_size=batch, sampler=sampler, collate_fn=_collate, drop_last=True)


def _collate(samples: Sequence[Tuple[Tensor, Tensor, float]]) -> List[Tensor]:
    inputs, targets, _ = zip(*samples)
    return [_taken(torch.stack(list(inputs))), _taken(torch.stack(list(targets)))]


def _taken(batch: Tensor) -> Tensor:
    """Return *batch* in a type that a wafer takes: casts from 8 and to 64 bits do not lower (release 2.10)."""
    return batch.to(_TAKEN.get(batch.dtype, batch.dtype))
