"""Fields and presets: complete, consistent, and readable where torch is not."""

import json
import re
import subprocess
import sys

import pytest
from probe_ranks import NAMED, contradictions
from tables import table

from pytest_mlhpc.cli import data as listing
from pytest_mlhpc.cli import main
from pytest_mlhpc.node.worker.workloads import catalogue
from pytest_mlhpc.node.worker.workloads.catalogue import VARIANTS, WORKLOADS
from pytest_mlhpc.node.worker.workloads.fields import arithmetic, compiled_devices, parallel
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

TRAINING = [workload for workload in WORKLOADS if workload.module and not workload.probe]
TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": (list, tuple), "mapping": dict,
         "size": int, "sizes": list, "words": (list, tuple), "sanity": (list, tuple)}  # fmt: skip
SHARED = {
    "global_batch",
    "precision",
    "optimizer",
    "learning_rate",
    "seed",
    "loader_workers",
    "channels_last",
}

each_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
each_training = pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: workload.name)


@each_workload
def test_every_workload_has_the_three_presets_with_their_steps(workload):
    assert {"smoke", "small", "reference"} <= set(workload.presets)
    assert all({"steps", "warmup"} <= set(preset) for preset in workload.presets.values())


@each_workload
def test_presets_name_fields_keep_their_limits_and_contradict_nothing(workload):
    for name, preset in workload.presets.items():
        for field, value in ((workload.fields[n], preset[n]) for n in set(preset) - {"steps", "warmup"}):
            assert isinstance(value, TYPES[field.type])
            assert not field.choices or value in field.choices
            numbers = value if field.type == "sizes" else [value]
            assert all(isinstance(number, str) or number >= field.minimum for number in numbers)
        assert not workload.contradictions(parameters_of(workload, name))


@each_workload
def test_defaults_are_of_their_type_and_explained(workload):
    for name, field in workload.fields.items():
        assert field.help, name
        assert field.default is None or isinstance(field.default, TYPES[field.type]), name
        assert field.default is None or not field.choices or field.default in field.choices, name


@each_training
def test_presets_leave_batch_precision_and_optimiser_alone(workload):
    assert all(not SHARED & set(preset) for preset in workload.presets.values())


@each_training
def test_the_defaults_are_the_published_sizes(workload):
    assert parameters_of(workload, "reference") == {n: f.default for n, f in workload.fields.items()}


def test_a_path_is_no_part_of_a_benchmarks_identity():
    outside = {f"{w.name}.{n}" for w in WORKLOADS for n, f in w.fields.items() if not f.identity}
    assert outside == {
        "language_model.text_path", "command.command", "command.metrics", "command.cwd", "command.reference", "command.files", "command.artifacts", "command.sanity", "storage.path", "reading.path",
        *(f"{workload.name}.{field}" for workload in TRAINING for field in ("staging_path", "telemetry")),
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [arithmetic, compiled_devices, parallel],
    ids=lambda fields: fields.__name__,
)
def test_fields_that_only_trainings_have_are_unset_which_contradicts_nothing(fields):
    having = [workload for workload in WORKLOADS if set(fields.FIELDS) <= set(workload.fields)]
    assert having == TRAINING
    for workload in having:
        values = {**parameters_of(workload, "smoke"), "accelerator": "cuda", "devices": 1, "warmup": 16}
        assert {values[name] for name in fields.FIELDS} == {None}
        assert fields.wrong(values) == fields.expected(values) == ()


def test_names_are_unique_and_variants_exist():
    assert len(WORKLOADS) == len(NAMED) == 17
    assert set(VARIANTS) <= set(NAMED)


def test_a_misspelt_field_is_refused():
    with pytest.raises(KeyError, match="cosmoflow has no field kernel"):
        parameters_of(WORKLOADS[0], "smoke", kernel=2)


@pytest.mark.parametrize(("name", "changes", "field", "text"), table("workloads")["contradictions"])
def test_a_contradiction_names_its_field(name, changes, field, text):
    ((found, sentence),) = contradictions(name, **changes).items()
    assert (found, text in sentence) == (field, True)


def test_all_contradictions_are_listed_at_once():
    found = contradictions("deepcam", height=50, width=70, global_batch=3, devices=2)
    assert list(found) == ["global_batch", "height", "width"]


def test_a_workload_that_cannot_be_built_does_not_hide_the_others(monkeypatch, capsys):
    row = {"workload": "x", "module": "no_such_module", "preset": "smoke", "parameters": {}}
    monkeypatch.setattr(catalogue, "requests", lambda: [row, row])
    assert catalogue.main([]) == 0
    described = {**row, "error": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert json.loads(capsys.readouterr().out) == [described, described]


@pytest.fixture(scope="module")
def rows():
    """Return what an interpreter that has torch counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "TIME_LIMIT_S", 800.0)  # which no busy machine reaches
        rows, problem = listing.describe_workloads(sys.executable, catalogue.requests())
    assert problem == ""
    return rows


@pytest.fixture
def program(tmp_path):
    """Return what makes a program of a shell's command."""

    def make(command):
        (tmp_path / "program").write_text(f"#!/bin/sh\nexec {command}\n")
        (tmp_path / "program").chmod(0o755)
        return str(tmp_path / "program")

    return make


@pytest.fixture
def python(rows, tmp_path, program):
    """Return a program that answers as that interpreter did."""
    (tmp_path / "rows").write_text(json.dumps(rows))
    return program(f"cat {tmp_path}/rows")


@pytest.mark.servers
class TestCommand:
    def test_every_workload_preset_and_variant_has_its_sizes(self, rows):
        found = {(r["workload"], r["preset"], r["variant"]): r for r in rows}
        assert found["cosmoflow", "reference", "kernel_size=2"]["model_parameters"] == 5_597_604
        assert found["deepcam", "reference", ""]["input_shape"] == [768, 1152, 16]
        assert found["language_model", "llama_8b", ""]["tokens_per_sample"] == 8192
        assert ("language_model", "llama_8b", "architecture=llama") not in found
        assert all(r["train_flop"] > 2.4 * r["forward_flop"] > 0 for r in rows)

    def test_it_prints_a_table_without_importing_torch(self, python):
        code = (
            f"import sys\nfrom pytest_mlhpc.cli import main\ncode = main(['data', 'workloads', '--python', {python!r}])\n"
            "assert 'torch' not in sys.modules\nsys.exit(code)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        lines = [line.split() for line in ended.stdout.splitlines()]
        assert [
            "resnet50", "reference", "stem=epcc", "224x224x3", "uint8", "25,549,352", "31.930", "GFLOP", "95.618", "GFLOP",
        ] in lines  # fmt: skip

    def test_json_holds_every_parameter(self, python, capsys):
        assert main(["data", "workloads", "--json", "--python", python]) == 0
        assert all("seed" in row["parameters"] for row in json.loads(capsys.readouterr().out)["workloads"])

    def test_an_interpreter_without_torch_leaves_the_sizes_open_and_says_so(self, program, capsys):
        assert main(["data", "workloads", "--python", program(f'{sys.executable} -S -E "$@"')]) == 1
        printed = capsys.readouterr()
        assert "has no torch. Install pytest-mlhpc[torch]" in printed.err
        assert "cosmoflow" in printed.out

    @pytest.mark.parametrize(
        ("program", "text"),
        [("/no/such/python", "cannot start"), ("/bin/true", "no JSON"), ("/bin/false", "ended with code 1")],
    )
    def test_a_broken_interpreter_is_named(self, program, text, capsys):
        assert main(["data", "workloads", "--python", program]) == 1
        assert re.search(f"{program}.*{text}|{text}.*{program}", capsys.readouterr().err)
