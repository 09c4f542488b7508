"""Fields and presets: complete, consistent, and readable where torch is not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.worker.workloads.catalogue import VARIANTS, WORKLOADS, parameters_of

ROOT = Path(__file__).resolve().parents[3]
TRAINING = [workload for workload in WORKLOADS if workload.module and not workload.probe]
TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": (list, tuple), "mapping": dict,
         "size": int, "sizes": list}  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_has_the_three_presets_with_their_steps(workload):
    assert {"smoke", "small", "reference"} <= set(workload.presets)
    assert all({"steps", "warmup"} <= set(preset) for preset in workload.presets.values())


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_presets_name_fields_and_keep_their_limits(workload):
    for preset in workload.presets.values():
        for name in set(preset) - {"steps", "warmup"}:
            field = workload.fields[name]
            assert isinstance(preset[name], TYPES[field.type])
            assert not field.choices or preset[name] in field.choices
            values = preset[name] if field.type == "sizes" else [preset[name]]
            assert all(isinstance(value, str) or value >= field.minimum for value in values)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_defaults_are_of_their_type_and_explained(workload):
    for name, field in workload.fields.items():
        assert field.help, name
        assert field.default is None or isinstance(field.default, TYPES[field.type]), name
        assert field.default is None or not field.choices or field.default in field.choices, name


@pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: workload.name)
def test_presets_leave_batch_precision_and_optimiser_alone(workload):
    shared = {
        "global_batch",
        "precision",
        "optimizer",
        "learning_rate",
        "seed",
        "loader_workers",
        "channels_last",
    }
    assert all(not shared & set(preset) for preset in workload.presets.values())


@pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: workload.name)
def test_the_defaults_are_the_published_sizes(workload):
    assert parameters_of(workload, "reference") == {n: f.default for n, f in workload.fields.items()}


def test_a_path_is_no_part_of_a_benchmarks_identity():
    outside = {f"{w.name}.{n}" for w in WORKLOADS for n, f in w.fields.items() if not f.identity}
    assert outside == {
        "language_model.text_path", "command.argv", "command.metrics", "command.cwd", "storage.path", "reading.path",
        *(f"{workload.name}.{field}" for workload in TRAINING for field in ("staging_path", "telemetry")),
    }  # fmt: skip


def test_names_are_unique_and_variants_exist():
    names = [workload.name for workload in WORKLOADS]
    assert len(names) == len(set(names)) == 17
    assert set(VARIANTS) <= set(names)


def test_a_misspelt_field_is_refused():
    with pytest.raises(KeyError, match="cosmoflow has no field kernel"):
        parameters_of(WORKLOADS[0], "smoke", kernel=2)


def test_the_catalogue_needs_nothing_but_the_standard_library():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS\n"
        "from pytest_mlhpc.worker.describe import requests\n"
        "print(len(requests()), sorted({'torch', 'numpy', 'yaml', 'pydantic'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split()[1] == "[]"


PAYLOAD = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("worker", "batch", "launch")
    for path in (ROOT / "pytest_mlhpc" / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", PAYLOAD)
def test_payload_code_is_python_3_9(path):
    tree = ast.parse((ROOT / path).read_text(), path, feature_version=(3, 9))
    # feature_version lets these two pass, Python 3.9 does not.
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Match, ast.TryStar))]


@pytest.mark.servers
class TestDescribe:
    def test_it_prints_every_workload_preset_and_variant_with_sizes(self):
        ended = subprocess.run(
            [sys.executable, "-m", "pytest_mlhpc.worker.describe"],
            capture_output=True, text=True, check=False, cwd=ROOT, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        rows = {(r["workload"], r["preset"], r["variant"]): r for r in json.loads(ended.stdout)}
        assert rows["cosmoflow", "reference", "kernel_size=2"]["model_parameters"] == 5_597_604
        assert rows["deepcam", "reference", ""]["input_shape"] == [768, 1152, 16]
        assert rows["language_model", "llama_8b", ""]["tokens_per_sample"] == 8192
        assert ("language_model", "llama_8b", "architecture=llama") not in rows
        assert all(r["train_flop"] > 2.4 * r["forward_flop"] > 0 for r in rows.values())

    def test_one_that_cannot_be_built_does_not_hide_the_others(self):
        from pytest_mlhpc.worker.describe import describe

        row = describe({"workload": "x", "module": "no_such_module", "preset": "smoke", "parameters": {}})
        assert row["error"] == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.servers
class TestCommand:
    def listed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys\nfrom pytest_mlhpc.cli import main\ncode = main(sys.argv[1:])\n"
            "assert 'torch' not in sys.modules\nsys.exit(code)"
        )
        command = [sys.executable, "-c", code, "workloads", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)

    def test_it_prints_a_table_without_importing_torch(self):
        ended = self.listed()
        assert (ended.returncode, ended.stderr) == (0, "")
        line = next(line for line in ended.stdout.splitlines() if line.startswith("resnet50") and "epcc" in line
                    and "reference" in line)  # fmt: skip
        assert line.split() == [
            "resnet50", "reference", "stem=epcc", "224x224x3", "uint8", "25,549,352",
            "31.930", "GFLOP", "95.618", "GFLOP",
        ]  # fmt: skip

    def test_json_holds_every_parameter(self):
        ended = self.listed("--json")
        assert ended.returncode == 0, ended.stderr
        rows = json.loads(ended.stdout)
        assert all("seed" in row["parameters"] for row in rows)

    def test_an_interpreter_without_torch_leaves_the_sizes_open_and_says_so(self, tmp_path):
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        python.chmod(0o755)
        ended = self.listed("--python", str(python))
        assert ended.returncode == 1
        assert "has no torch. Install pytest-mlhpc[torch]" in ended.stderr
        assert "cosmoflow" in ended.stdout
        assert "Traceback" not in ended.stderr

    @pytest.mark.parametrize(
        ("program", "text"),
        [("/no/such/python", "cannot start"), ("/bin/true", "no JSON"), ("/bin/false", "ended with code 1")],
    )
    def test_a_broken_interpreter_is_named(self, program, text):
        ended = self.listed("--python", program)
        assert ended.returncode == 1
        assert text in ended.stderr
        assert program in ended.stderr
