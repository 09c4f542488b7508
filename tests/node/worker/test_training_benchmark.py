"""benchmarks/training.py: what it calls the method is that, and nothing is bound on a CPU."""

import pytest
import torch

from benchmarks import plain, training


def found(device):
    one = {"ratio": [1.2, 1.4, 1.6], "share": [0.9] * 3, "cores": [0.5], "ours": [14.0], "theirs": [10.0]}
    return {"device": device, "preset": "smoke", "formats": {"tfrecord-gzip": one, "hdf5": one}}


def test_on_a_cpu_figures_are_printed_and_nothing_is_bound():
    rows = training.rows_of("cosmoflow", found("cpu"))
    assert [(row.ok, row.reach) for row in rows] == [
        (None, "- (GPU: >= 1.3)"),
        (None, "- (GPU: >= 0.95)"),
    ] * 2
    assert rows[0].what == "cosmoflow smoke on cpu, tfrecord-gzip: ours / the HPDC'24 method"
    assert rows[0].measured == "1.400 (1.200 to 1.600 in 3 turns; 14.0 against 10.0 samples/s)"
    assert rows[1].measured == "0.900 (0.900 to 0.900 in 3 turns; reading takes 0.50 cores)"


def test_on_a_gpu_all_but_the_share_of_gzip_are_bound():
    rows = [(row.ok, row.reach) for row in training.rows_of("cosmoflow", found("cuda"))]
    assert rows == [(True, ">= 1.3"), (None, "- (GPU: >= 0.95)"), (True, ">= 1.3"), (False, ">= 0.95")]


def test_the_methods_samples_are_made_ready_one_by_one():
    task, _ = plain.task_of("cosmoflow", "smoke", input_size=16, layers=3, base_channels=4)
    stored = torch.arange(16**3 * 4).remainder(7).reshape(16, 16, 16, 4).to(torch.int16)
    inputs, targets = training.Ready([(stored, torch.zeros(4), 0.0)], task)[0]
    assert (tuple(inputs.shape), inputs.dtype, tuple(targets.shape)) == ((4, 16, 16, 16), torch.float32, (4,))
    assert torch.equal(inputs, torch.log1p(stored.permute(3, 0, 1, 2).float()))


@pytest.mark.servers
def test_the_method_trains_from_files_by_processes_of_its_own(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    for name, number in {"STEPS": 2, "WARMUP": 1, "READERS": 1}.items():
        monkeypatch.setattr(training, name, number)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sides = training.Sides("cosmoflow", tmp_path)
    run = sides.files("hdf5")
    assert sides.theirs(run) > 0
    ours = sides.ours(run)
    assert min(ours.rate, ours.reading_cores) > 0
