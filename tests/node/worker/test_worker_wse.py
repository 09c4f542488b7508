"""Cerebras' systems where the package is not: what is refused, and what is said; and how a compiler's words are found."""

import json
import os
import sys

import pytest
import torch
from probe_ranks import contradictions
from zipped_batch import training

from pytest_mlhpc.node.worker import rank
from pytest_mlhpc.node.worker.accelerators import wse
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import lowering
from pytest_mlhpc.node.worker.probes.measure import ProbePlace


def refused(workload="cosmoflow", **changes):
    return contradictions(workload, **{"accelerator": "wse", **changes})


def run_of(workload="cosmoflow", **changes):
    return training(sys.executable, workload, device_type="wse", **changes)


WAFER = wse.Wse(0, "2.10.0")


def test_an_environment_without_cerebras_package_is_refused_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cerebras", None)
    text = r"^wrong_device: .*Python 3\.11 with cerebras-pytorch==2\.10\.0"
    with pytest.raises(WorkerFailure, match=text):
        open_device("wse", 0)


@pytest.mark.parametrize(
    "fields",
    [{}, {"cerebras": "cpu", "precision": "bf16"}, {"csx": 4, "global_batch": 8, "precision": "fp16"}],
)
def test_what_the_device_can_do_is_taken(fields):
    assert refused(**fields) == {}


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"devices": 2}, "devices", "one rank drives all Cerebras systems of a run: say csx=2 instead"),
        ({"optimizer": "lars"}, "optimizer", "cerebras.pytorch has sgd, adam, adamw, lamb, not lars"),
        ({"precision": "tf32"}, "precision", "a wafer computes in fp32, bf16, fp16, not tf32"),
        ({"precision": "fp16", "cerebras": "cpu"}, "precision", "its CPU back-end computes in fp32, bf16, not fp16"),
        ({"csx": 3, "global_batch": 8}, "global_batch", "global_batch=8 does not divide over csx=3 systems"),
        ({"csx": 2, "cerebras": "cpu"}, "csx", "the CPU back-end has no systems"),
        ({"data": "device"}, "data", "samples are streamed to the wafer, none lie there; use memory or files"),
        ({"until": "quality"}, "until", "wse trains for a number of steps; until='quality' is for cpu, cuda, rocm and xpu"),
        ({"bagging": [1, 1]}, "bagging", "wse has no groups of ranks; bagging is for cpu, cuda, rocm and xpu"),
        ({"gradient_accumulation": 2}, "gradient_accumulation",
         "wse shares a batch by itself where it does not fit; say a global_batch alone"),
        ({"compile": "default"}, "compile", "wse compiles every model in a way of its own"),
        ({"batch_norm_group": "all"}, "batch_norm_group", "wse normalises in a way of its own"),
        ({"accelerator": "ipu", "batch_norm_group": 2}, "batch_norm_group", "ipu normalises in a way of its own"),
        ({"accelerator": "cpu", "csx": 2}, "csx", "csx is for Cerebras systems; cpu is none"),
        ({"accelerator": "ipu", "until": "quality"}, "until",
         "ipu trains for a number of steps; until='quality' is for cpu, cuda, rocm and xpu"),
    ],
)  # fmt: skip
def test_what_the_device_cannot_do_is_refused_by_field(changes, field, text):
    assert refused(**changes)[field] == text


@pytest.mark.parametrize("workload", ["peaks", "kernels"])
@pytest.mark.parametrize("accelerator", ["ipu", "wse"])
def test_the_hosts_cores_are_never_measured_in_the_name_of_a_device_that_torch_does_not_drive(
    workload, accelerator
):
    text = f"torch computes nothing on {accelerator} by itself, so this would measure the host"
    assert contradictions(workload, accelerator=accelerator) == {"": text}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"accelerator": "wse"}, {}),
        ({"accelerator": "cuda"}, {"": "lowering is for Cerebras' wafers; cuda is none"}),
        (
            {"accelerator": "wse", "devices": 2, "precision": "tf32"},
            {
                "devices": "one process lowers; more would do the same again",
                "precision": "a wafer computes in fp32, bf16, fp16, not tf32",
            },
        ),
    ],
)
def test_lowering_is_for_wafers_and_for_one_process(changes, found):
    assert contradictions("lowering", **changes) == found


def test_a_run_for_a_wafer_has_a_loop_of_its_own():
    assert rank.measure_of(run_of()) is wse.measure


@pytest.mark.parametrize(
    ("changes", "group", "text"),
    [
        ({"ranks": 2}, Group(0, 0, 2), "one rank drives all Cerebras systems, not 2; say csx="),
        ({"parameters": {"csx": 3, "global_batch": 8}}, Group(), "^worker_exit: global_batch=8 does not divide over csx=3"),
    ],
    ids=["several ranks", "systems with unequal shares"],
)  # fmt: skip
def test_what_is_refused_before_anything_is_compiled(changes, group, text, monkeypatch, tmp_path):
    monkeypatch.setattr(wse, "load", lambda: None)
    with pytest.raises(WorkerFailure, match=text):
        wse.measure(run_of(**changes), group, WAFER, tmp_path, lambda *_: None)


@pytest.mark.parametrize(("csx", "batch", "share"), [(None, 7, 1), (4, 8, 4)])
def test_systems_share_a_batch_evenly(csx, batch, share):
    assert wse.shared(csx, batch) == share


@pytest.mark.parametrize(("csx", "kind"), [(None, "CPU"), (2, "CSX")])
def test_what_the_package_writes_lies_where_it_goes_with_the_run(csx, kind, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(wse, "open_backend", lambda *given, **_: opened.append(given[1:3]))
    monkeypatch.setattr(wse, "backend_options", lambda *_: {})
    monkeypatch.setattr(wse.importlib, "import_module", lambda _: None)
    wse._backend(None, run_of(), tmp_path, csx)
    assert opened == [(kind, tmp_path / "data" / "cerebras-run-cosmoflow")]


def test_graphs_lie_where_they_go_with_the_run_and_go_before_it_where_nobody_is_killed(tmp_path):
    run = run_of("lowering", parameters={"of": "cosmoflow"}, steps=1, warmup_steps=0)
    probe = lowering.probe(ProbePlace(run, Group(), WAFER, tmp_path))
    (folder,) = (tmp_path / "data").iterdir()
    assert folder.name.startswith("lowering-run-lowering-")
    probe.close()
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(("kind", "precision"), [("CPU", "fp16"), ("CSX", "tf32")])
def test_a_precision_that_a_backend_lacks_is_refused_before_it_is_opened(tmp_path, kind, precision):
    text = f"^not_supported: precision={precision}: Cerebras' {kind} back-end"
    with pytest.raises(WorkerFailure, match=text):
        wse.open_backend(None, kind, tmp_path, precision)


def test_an_optimizer_that_cerebras_lacks_is_named():
    network = torch.nn.Linear(2, 2)
    groups = wse._groups(torch.optim.Adagrad(network.parameters()), network)
    with pytest.raises(WorkerFailure, match=r"has no optimizer Adagrad; it has SGD, Adam, AdamW, Lamb"):
        wse._optimizer(None, groups, network)


def diagnostics(folder, *texts):
    place = folder / "executors" / "000001"
    place.mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / f"traceback_{number}.json").write_text(text)


def entry(message, level="Error", *notes):
    return {"message": message, "compileMetadata": {"severityLevel": level, "notes": list(notes)}}


def test_errors_of_the_compiler_are_found_once_each_and_notes_are_not(tmp_path):
    error = entry("groups != 1\n are not supported", "Error", entry("see current operation", "Note"))
    diagnostics(
        tmp_path, json.dumps([error, error, entry("slow", "Warning")]), json.dumps(entry("no kernel"))
    )
    assert lowering.errors(tmp_path) == ["groups != 1 are not supported", "no kernel"]


def test_diagnostics_that_are_cut_off_empty_or_of_another_shape_are_no_reason_to_fail(tmp_path):
    texts = ("", '{"message": "cut', "7", '{"message": 7}', '{"compileMetadata": null, "message": "x"}')
    diagnostics(tmp_path, *texts)
    assert lowering.errors(tmp_path) == []


def test_a_reason_is_one_line_of_bounded_length():
    assert wse.reason(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert wse.reason(RuntimeError()) == "RuntimeError"
    assert len(wse.reason(RuntimeError("x" * 9999))) == 600


def error(*names):
    """Return an error whose class has these names, the last that of its base: Cerebras' own are not here."""
    kind: type[Exception] = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind("the cluster's words")


@pytest.mark.parametrize(
    ("ended", "outcome", "text"),
    [
        *(
            (error(name), "wrong_device", f"no Cerebras cluster can be used from this host: {name}: the cluster's words")
            for name in wse.UNREACHABLE
        ),
        (error("PicklableRpcError", "RpcError"), "wrong_device", "no Cerebras cluster can be used from this host"),
        (error("ApplianceResourceExhausted", "ApplianceClientException"), "worker_exit",
         "Cerebras' cluster ended the run before its first step: ApplianceResourceExhausted: the cluster's words"),
        (error("ApplianceCompilationError", "ApplianceClientException"), "cannot_lower",
         "cerebras.pytorch cannot compile this workload: ApplianceCompilationError: the cluster's words"),
        (error("RuntimeError"), "cannot_lower", "cerebras.pytorch cannot compile this workload: RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_only_what_the_compiler_cannot_take_is_called_so(ended, outcome, text):
    found, reason = wse.before_any_step(ended)
    assert (found, reason[: len(text)]) == (outcome, text)


def test_a_cluster_may_import_from_all_that_this_process_imports_from(tmp_path):
    class Config:
        def __init__(self, **options):
            self.options = options

    module = type("module", (), {"ClusterConfig": Config})
    config = wse.backend_options(4, tmp_path, 90.5, module)["cluster_config"]
    assert config.options == {"num_csx": 4, "job_time_sec": 90}
    assert config.mount_dirs == [str(tmp_path)]
    assert config.python_paths
    assert all(os.path.exists(path) for path in config.python_paths)  # noqa: PTH110 - as the package checks it
