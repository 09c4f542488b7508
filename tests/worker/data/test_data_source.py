import importlib
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.worker.data import make, source
from pytest_mlhpc.worker.data.errors import DataError
from pytest_mlhpc.worker.data.files import list_files
from pytest_mlhpc.worker.data.layout import layout_of
from pytest_mlhpc.worker.data.sampler import ShardedSampler
from pytest_mlhpc.worker.data.source import open_source
from pytest_mlhpc.worker.workloads.base import Task, TensorSpec
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

NAMES = ["cosmoflow", "deepcam", "resnet50", "language_model"]
KNOWN = {workload.name: workload for workload in WORKLOADS}


def task_of(name, **changes) -> Task:
    task: Task = importlib.import_module(KNOWN[name].module).task(
        parameters_of(KNOWN[name], "smoke", **changes)
    )
    return task


def plan(name, data_source="memory", **fields) -> RunPlan:
    parameters = parameters_of(KNOWN[name], "smoke", **fields.pop("changes", {}))
    return RunPlan(
        run_id="r", nonce="n", attempt=0, workload=name, parameters=parameters, nodes=1, ranks=1, cores_per_rank=1,
        device_type="cpu", launcher="plain", time_limit_s=60, steps=1, warmup_steps=1, data_source=data_source, **fields,
    )  # fmt: skip


def opened(tmp_path, name, data_source="memory", count=12, seed=5, **fields):
    again = fields.pop("again", None)
    run = plan(name, data_source, **fields)
    return open_source(run, task_of(name), count=count, seed=seed, directory=str(tmp_path), again=again)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data_source", source.SOURCES)
def test_samples_are_what_the_task_takes(tmp_path, name, data_source):
    task = task_of(name)
    found = opened(tmp_path, name, data_source)
    assert len(found.dataset) == 12
    for index in range(12):
        x, y, read_s = found.dataset[index]
        assert (tuple(x.shape), x.dtype) == (task.input.shape, task.input.dtype)
        assert (tuple(y.shape), y.dtype) == (task.target.shape, task.target.dtype)
        assert (read_s > 0) == (data_source == "files")
    x, y, _ = found.dataset[0]
    prepared = task.prepare(x.unsqueeze(0), y.unsqueeze(0))
    assert torch.isfinite(prepared[0].float()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data_source", ["memory", "files"])
def test_equal_seeds_are_equal_data(tmp_path, name, data_source):
    first, again = (opened(tmp_path / where, name, data_source).dataset for where in "ab")
    for index in range(12):
        assert (first[index][0] == again[index][0]).all()
        assert (first[index][1] == again[index][1]).all()


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "resnet50"])
def test_other_seeds_are_other_data(tmp_path, name):
    first, other = (opened(tmp_path, name, seed=seed).dataset for seed in (1, 2))
    assert any((first[index][0] != other[index][0]).any() for index in range(12))


@pytest.mark.parametrize("name", NAMES)
def test_kind_and_source_are_told_truly(tmp_path, name):
    kind = "real" if name == "language_model" else "synthetic"
    for data_source in source.SOURCES:
        found = opened(tmp_path, name, data_source)
        assert (found.kind, found.source, found.cache) == (kind, data_source, "unknown")


@pytest.mark.parametrize("name", NAMES)
def test_loader_processes_read_the_same_samples(tmp_path, name):
    dataset = opened(tmp_path, name, "files").dataset
    assert pickle.loads(pickle.dumps(dataset))[3][0].shape == dataset[3][0].shape  # noqa: S301 - our own bytes
    loader = DataLoader(dataset, batch_size=4, sampler=ShardedSampler(12, 0, 1, 0), num_workers=1)
    order = list(ShardedSampler(12, 0, 1, 0))
    seen = list(itertools.chain(*(batch[0] for batch in loader)))
    assert all((x == dataset[index][0]).all() for x, index in zip(seen, order, strict=True))


@pytest.mark.parametrize("wanted", ["cold", "warm"])
def test_the_cache_is_what_was_verified(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(source.cache, "prepare", lambda paths, asked: f"{asked} {len(list(paths))}")
    assert opened(tmp_path, "cosmoflow", "files", cache=wanted).cache == f"{wanted} 12"


def test_a_site_set_is_read_in_part_and_stays_real(tmp_path):
    run = plan("cosmoflow")
    layout = layout_of("cosmoflow", run.parameters, samples=20, validation=4, seed=0)
    make.make_set(layout, tmp_path / "site")
    (tmp_path / "site" / "manifest.json").unlink()  # what a real set has not
    found = opened(tmp_path, "cosmoflow", "files", data_path=str(tmp_path / "site"), data_kind="real")
    assert found.kind == "real"
    assert len(found.dataset) == 12
    assert len({found.dataset.reader.paths[index] for index in found.dataset.chosen}) == 12
    assert all(path.parent.name == "train" for path in found.dataset.reader.paths)


@pytest.mark.parametrize("below", ["", "train"])
def test_a_set_of_ours_is_synthetic_whatever_is_claimed(tmp_path, below):
    layout = layout_of("cosmoflow", plan("cosmoflow").parameters, samples=12, validation=0, seed=0)
    make.make_set(layout, tmp_path / "site")
    where = str(tmp_path / "site" / below)
    assert opened(tmp_path, "cosmoflow", "files", data_path=where, data_kind="real").kind == "synthetic"


def test_a_smaller_set_than_asked_is_read_whole(tmp_path):
    layout = layout_of("deepcam", plan("deepcam").parameters, samples=3, validation=0, seed=0)
    make.make_set(layout, tmp_path / "site")
    assert len(opened(tmp_path, "deepcam", "files", data_path=str(tmp_path / "site")).dataset) == 3


def test_a_set_of_another_size_is_told_before_the_run(tmp_path):
    parameters = parameters_of(KNOWN["cosmoflow"], "smoke", input_size=16)
    make.make_set(layout_of("cosmoflow", parameters, samples=2, validation=0, seed=0), tmp_path / "site")
    with pytest.raises(DataError, match=r"expected 262144 .int16 32x32x32x4"):
        opened(tmp_path, "cosmoflow", "files", data_path=str(tmp_path / "site"))


def test_a_set_that_takes_hours_is_not_made_within_a_run(tmp_path):
    with pytest.raises(
        DataError, match=r"make the set once with `mlhpc data make deepcam --samples 100000 DIR`"
    ):
        opened(tmp_path, "deepcam", "files", count=100_000)


def test_of_a_set_that_is_too_large_to_be_made_a_part_is_read_again(tmp_path, monkeypatch):
    raw = 32**3 * 4 * 2
    monkeypatch.setattr(source, "MADE_BUDGET", 9 * raw)
    monkeypatch.setattr(source, "AGAIN_BUDGET", 3 * raw)
    assert len(opened(tmp_path, "cosmoflow", "files", count=9, again=2).dataset) == 9
    few = opened(tmp_path, "cosmoflow", "files", count=10, again=2)
    assert (len(few.dataset), few.again) == (3, True)
    step = opened(tmp_path, "cosmoflow", "files", count=10, again=8)
    assert (len(step.dataset), step.again) == (8, True)


@pytest.mark.parametrize(
    "asked", [{"again": 10}, {"again": 2, "cache": "cold"}, {}], ids=["a step", "cold", "never again"]
)
def test_a_part_is_not_made_where_it_would_not_do(tmp_path, monkeypatch, asked):
    raw = 32**3 * 4 * 2
    monkeypatch.setattr(source, "MADE_BUDGET", 9 * raw)
    monkeypatch.setattr(source, "AGAIN_BUDGET", 3 * raw)
    with pytest.raises(
        DataError, match=r"make the set once with `mlhpc data make cosmoflow --samples 10 DIR`"
    ):
        opened(tmp_path, "cosmoflow", "files", count=10, **asked)


def test_stats_that_are_missing_are_told(tmp_path):
    make.make_set(
        layout_of("deepcam", plan("deepcam").parameters, samples=2, validation=0, seed=0), tmp_path / "site"
    )
    (tmp_path / "site" / "stats.h5").unlink()
    with pytest.raises(DataError, match=r"has no stats\.h5"):
        opened(tmp_path, "deepcam", "files", data_path=str(tmp_path / "site"))


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_not_there_is_told(tmp_path, name):
    with pytest.raises(DataError, match="is not there"):
        opened(tmp_path, name, "files", data_path=str(tmp_path / "gone"))


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "resnet50"])
def test_a_folder_of_something_else_is_told(tmp_path, name):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "readme.txt").touch()
    with pytest.raises(DataError, match=r"holds no .* among its 1 files"):
        opened(tmp_path, name, "files", data_path=str(tmp_path / "site"))


def test_damage_is_told_by_the_loader_process_with_its_file(tmp_path):
    found = opened(tmp_path, "cosmoflow", "files")
    for path in list_files(tmp_path / "data"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"synthetic_\d+.tfrecord: gzip data is cut short"):
        next(iter(DataLoader(found.dataset, num_workers=1)))


def test_a_missing_library_is_told_with_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(
        DataError, match=r"h5py is needed for this format, and .*python.* does not have it"
    ) as told:
        opened(tmp_path, "deepcam", "files")
    assert told.value.outcome == "import_failed"


def test_a_source_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(DataError, match="tape: is no source of data, choose one of memory, device, files"):
        opened(tmp_path, "deepcam", "tape")


def test_a_foreign_workload_trains_from_memory_and_says_so_for_files(tmp_path):
    task = task_of("cosmoflow")
    foreign = plan("cosmoflow", "files", data_path=str(tmp_path))
    foreign = type(foreign)(**{**vars(foreign), "workload": "mine"})
    with pytest.raises(DataError, match="no file format is known for workload mine, use data='memory'"):
        open_source(foreign, task, count=1, seed=0, directory=str(tmp_path))


def test_a_vocabulary_without_room_for_bytes_is_told(tmp_path):
    spec = TensorSpec((8,), torch.uint8)
    task = type(task_of("language_model"))(
        **{**vars(task_of("language_model")), "input": spec, "target": spec, "classes": 65}
    )
    with pytest.raises(DataError, match="has 65 tokens, bytes need 256"):
        open_source(plan("language_model"), task, count=1, seed=0, directory=str(tmp_path))


def test_text_of_a_given_folder_is_used(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc" * 1000)
    found = opened(tmp_path, "language_model", "files", changes={"text_path": str(tmp_path)})
    assert bytes(found.dataset[0][0][:6].tolist()) == b"abcabc"
    assert found.kind == "real"


def test_memory_holds_few_distinct_samples_of_a_large_set(tmp_path):
    found = opened(tmp_path, "cosmoflow", count=10_000)
    assert len(found.dataset) == 10_000
    assert len(found.dataset.inputs) <= 64
    assert (found.dataset[9_999][0] == found.dataset.inputs[9_999 % len(found.dataset.inputs)]).all()


@pytest.mark.servers
@pytest.mark.parametrize("data_source", ["memory", "files"])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(tmp_path: Path, name, data_source):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    changes = {"resnet50": {"image_size": 32}, "deepcam": {"height": 48, "width": 48}}.get(name, {})
    task = task_of(name, **changes)
    run = plan(name, data_source, changes=changes)
    dataset = open_source(run, task, count=8, seed=5, directory=str(tmp_path)).dataset
    x, y = task.prepare(
        *(torch.stack(parts) for parts in list(zip(*(dataset[i] for i in range(8)), strict=True))[:2])
    )
    model = task.model().train()
    optimizer = task.optimizer(model)
    losses = []
    for _ in range(12):
        loss = task.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < sum(losses[:4])
