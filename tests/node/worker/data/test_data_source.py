import dataclasses
import itertools
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from file_trees import write_tree
from probe_ranks import smoke, task_of
from rank_helpers import run_plan
from torch.utils.data import DataLoader

from pytest_mlhpc.node.worker import loop
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.data.dataset_files import DataError, list_files
from pytest_mlhpc.node.worker.data.source import ShardedSampler, open_source
from pytest_mlhpc.node.worker.loop import Recorder

WITH_FILES = ["cosmoflow", "deepcam", "resnet50"]
NAMES = [*WITH_FILES, "language_model"]

each_name = pytest.mark.parametrize("name", NAMES)

#: Bytes of one unpacked sample of the smallest CosmoFlow.
RAW = 32**3 * 4 * 2


def opened(folder, name, data_source="memory", *, count=12, seed=5, again=None, task=None, **fields):
    parameters = smoke(name, **fields.pop("changes", {}))
    run = run_plan(
        **{"workload": name, "parameters": parameters, "variables": {}, **fields}, data_source=data_source
    )
    return open_source(run, task or task_of(name), count=count, seed=seed, directory=str(folder), again=again)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return what was opened of each workload and source; tests only read it."""
    cases = itertools.product(NAMES, source.SOURCES)
    return {case: opened(tmp_path_factory.mktemp("run"), *case) for case in cases}


@pytest.mark.parametrize("data_source", source.SOURCES)
@each_name
def test_samples_are_what_the_task_takes(made, name, data_source):
    task, found = task_of(name), made[name, data_source]
    assert len(found.dataset) == 12
    for x, y, read_s in map(found.dataset.__getitem__, range(12)):
        assert (tuple(x.shape), x.dtype) == (task.input.shape, task.input.dtype)
        assert (tuple(y.shape), y.dtype) == (task.target.shape, task.target.dtype)
        assert (read_s > 0) == (data_source == "files")
    x, y, _ = found.dataset[0]
    assert torch.isfinite(task.prepare(x.unsqueeze(0), y.unsqueeze(0))[0].float()).all()
    kind = "real" if name == "language_model" else "synthetic"
    assert (found.kind, found.source, found.cache) == (kind, data_source, "unknown")


def same(first, other):
    return [all((first[index][part] == other[index][part]).all() for part in (0, 1)) for index in range(12)]


@pytest.mark.parametrize("data_source", ["memory", "files"])
@each_name
def test_equal_seeds_are_equal_data_and_other_seeds_others(made, tmp_path, name, data_source):
    again = opened(tmp_path / "again", name, data_source).dataset
    assert all(same(made[name, data_source].dataset, again))
    if name in WITH_FILES:
        assert not all(same(again, opened(tmp_path / "other", name, data_source, seed=2).dataset))


@each_name
def test_loader_processes_read_the_same_samples(made, name):
    dataset = made[name, "files"].dataset
    assert pickle.loads(pickle.dumps(dataset))[3][0].shape == dataset[3][0].shape  # noqa: S301 - our own bytes
    loader = DataLoader(dataset, batch_size=4, sampler=ShardedSampler(12, 0, 1, 0), num_workers=1)
    read = list(itertools.chain(*(batch[0] for batch in loader)))
    order = list(ShardedSampler(12, 0, 1, 0))
    assert all((x == dataset[index][0]).all() for x, index in zip(read, order, strict=True))


@pytest.mark.parametrize("asked", ["cold", "warm"])
def test_the_cache_is_what_was_verified(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(source.dataset_files, "prepare", lambda paths, state: f"{state} {len(list(paths))}")
    assert opened(tmp_path, "cosmoflow", "files", count=2, cache=asked).cache == f"{asked} 2"


def test_a_site_set_is_read_in_part_and_stays_real(made_set, tmp_path):
    root = shutil.copytree(made_set("cosmoflow", samples=20, validation=4), tmp_path / "site")
    (root / "manifest.json").unlink()  # what a real set has not
    found = opened(tmp_path, "cosmoflow", "files", data_path=str(root), data_kind="real")
    assert found.kind == "real"
    assert len(found.dataset) == 12
    assert len({found.dataset.reader.paths[index] for index in found.dataset.chosen}) == 12
    assert {path.parent.name for path in found.dataset.reader.paths} == {"train"}


@pytest.mark.parametrize("below", ["", "train"])
def test_a_set_of_ours_is_synthetic_whatever_is_claimed(made_set, tmp_path, below):
    root = made_set("cosmoflow", samples=20, validation=4) / below
    assert opened(tmp_path, "cosmoflow", "files", data_path=str(root), data_kind="real").kind == "synthetic"


def test_a_smaller_set_than_asked_is_read_whole(made_set, tmp_path):
    assert len(opened(tmp_path, "deepcam", "files", data_path=str(made_set("deepcam"))).dataset) == 4


@pytest.fixture
def small_budgets(monkeypatch):
    """Make nine samples at most within a run, or three that are read again."""
    monkeypatch.setattr(source, "MADE_BUDGET", 9 * RAW)
    monkeypatch.setattr(source, "AGAIN_BUDGET", 3 * RAW)


@pytest.mark.usefixtures("small_budgets")
@pytest.mark.parametrize(
    ("count", "again", "found"), [(9, 2, (9, False)), (10, 2, (3, True)), (10, 8, (8, True))]
)
def test_of_a_set_that_is_too_large_to_be_made_a_part_is_read_again(tmp_path, count, again, found):
    part = opened(tmp_path, "cosmoflow", "files", count=count, again=again)
    assert (len(part.dataset), bool(part.again)) == found


@pytest.mark.usefixtures("small_budgets")
@pytest.mark.parametrize(
    "asked", [{"again": 10}, {"again": 2, "cache": "cold"}, {}], ids=["a step", "cold", "never again"]
)
def test_a_part_is_not_made_where_it_would_not_do(tmp_path, asked):
    text = r"make the set once with `mlhpc data make cosmoflow --samples 10 DIR`"
    with pytest.raises(DataError, match=text):
        opened(tmp_path, "cosmoflow", "files", count=10, **asked)


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("deepcam", {"count": 100_000}, r"make the set once with `mlhpc data make deepcam --samples 100000 DIR`"),
        ("deepcam", {"data_source": "tape"}, "tape: is no source of data, choose one of memory, device, files"),
        ("cosmoflow", {"workload": "mine", "data_path": "/"}, "no file format is known for workload mine, use data='memory'"),
        ("language_model", {"task": dataclasses.replace(task_of("language_model"), classes=65)}, "has 65 tokens, bytes need 256"),
        *((name, {"data_path": "/gone"}, "is not there") for name in NAMES),
    ],
    ids=["hours to make", "no source", "a foreign workload", "no room for bytes", *(f"no {name}" for name in NAMES)],
)  # fmt: skip
def test_what_cannot_be_opened_is_refused(tmp_path, name, fields, text):
    with pytest.raises(DataError, match=text):
        opened(tmp_path, name, **{"data_source": "files", **fields})


@pytest.fixture
def site(made_set, tmp_path):
    """Return a folder of sets that do not fit."""
    shutil.copytree(made_set("deepcam"), tmp_path / "incomplete")
    (tmp_path / "incomplete" / "stats.h5").unlink()
    write_tree(tmp_path, {"other/readme.txt": ""})
    (tmp_path / "smaller").symlink_to(made_set("cosmoflow", samples=2, validation=0, input_size=16))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "folder", "text"),
    [
        ("cosmoflow", "smaller", r"expected 262144 .int16 32x32x32x4"),
        ("deepcam", "incomplete", r"has no stats\.h5"),
        *((name, "other", r"holds no .* among its 1 files") for name in WITH_FILES),
    ],
)
def test_a_set_that_does_not_fit_is_refused_before_the_run(site, name, folder, text):
    with pytest.raises(DataError, match=text):
        opened(site, name, "files", data_path=str(site / folder))


def test_damage_is_raised_by_the_loader_process_with_its_file(tmp_path):
    found = opened(tmp_path, "cosmoflow", "files", count=2)
    for path in list_files(tmp_path / "data"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"synthetic_\d+.tfrecord: gzip data is cut short"):
        next(iter(DataLoader(found.dataset, num_workers=1)))


def test_a_missing_library_is_named_with_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    text = r"h5py is needed for this format, and .*python.* does not have it"
    with pytest.raises(DataError, match=text) as refused:
        opened(tmp_path, "deepcam", "files")
    assert refused.value.outcome == "import_failed"


def test_text_of_a_given_folder_is_used(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc" * 1000)
    found = opened(tmp_path, "language_model", "files", changes={"text_path": str(tmp_path)})
    assert bytes(found.dataset[0][0][:6].tolist()) == b"abcabc"
    assert found.kind == "real"


def test_memory_holds_few_distinct_samples_of_a_large_set(tmp_path):
    dataset = opened(tmp_path, "cosmoflow", count=10_000).dataset
    assert len(dataset) == 10_000
    assert len(dataset.inputs) <= 64
    assert (dataset[9_999][0] == dataset.inputs[9_999 % len(dataset.inputs)]).all()


@pytest.mark.servers
@each_name
def test_a_model_learns_samples_of_files_by_heart(tmp_path: Path, name):
    torch.manual_seed(0)
    changes = {"resnet50": {"image_size": 32}, "deepcam": {"height": 48, "width": 48}}.get(name, {})
    task = task_of(name, **changes)
    dataset = opened(tmp_path, name, "files", count=6, changes=changes, task=task).dataset
    inputs, targets, _ = zip(*map(dataset.__getitem__, range(6)), strict=True)
    model = task.model().train()
    trainer = loop.Trainer(task, model, task.optimizer(model), Cpu(0, "test"))
    recorder = Recorder()
    recorder.start(trainer.accelerator)
    batches = itertools.repeat((torch.stack(inputs), torch.stack(targets), 0.0))
    loop.run_steps(trainer, batches, 9, recorder, lambda *_: None)
    losses = loop.resolve_losses(recorder.losses)
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
