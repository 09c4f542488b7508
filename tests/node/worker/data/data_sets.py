"""Synthetic sets as tests ask for them, and how a damaged file is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from probe_ranks import NAMED

from pytest_mlhpc.node.worker.data.dataset_files import DataError, SetLayout, digest, layout_of, list_files
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

#: Every workload that has files, in each of its formats.
FORMATS = [
    ("cosmoflow", "tfrecord-gzip"), ("cosmoflow", "tfrecord"), ("cosmoflow", "hdf5"), ("deepcam", "hdf5"), ("resnet50", "images"),
]  # fmt: skip


def layout(workload, form="", *, preset="smoke", samples=4, validation=1, seed=0, **fields) -> SetLayout:
    parameters = parameters_of(NAMED[workload], preset, **fields)
    return layout_of(workload, parameters, samples=samples, validation=validation, seed=seed, form=form)


def digests(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): digest(path) for path in list_files(root)}


def assert_refused(read: Callable[[Path], object], path: Path, text: str) -> None:
    """*read* refuses *path* by an error that begins with the path and holds *text*."""
    with pytest.raises(DataError) as refused:
        read(path)
    assert str(refused.value).startswith(str(path))
    assert text in str(refused.value)
