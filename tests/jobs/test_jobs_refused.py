"""What is refused when it is declared, before anything is submitted: for each mistake the words that name it."""

from __future__ import annotations

import pytest

RATE = {"rate": {"pattern": r"rate: (\S+)", "unit": "items/s", "better": "higher"}}


@pytest.mark.parametrize(
    ("workload", "fields", "text"),
    [
        ("cosmflow", {}, "unknown workload 'cosmflow'"),
        ("cosmflow", {}, "did you mean 'cosmoflow'"),
        (
            "cosmoflow",
            {"kernal_size": 2},
            "t.py::test_it: kernal_size: cosmoflow has no such field (did you mean 'kernel_size'?)",
        ),
        ("cosmoflow", {"nodes": 2, "devices": 3}, "3 devices do not divide over 2 nodes"),
        ("cosmoflow", {"data": "cosmos"}, "neither a data set of sys nor a path (did you mean 'cosmo'?)"),
        ("cosmoflow", {"devices": 4, "global_batch": 10}, "global_batch=10 does not divide over 4 devices"),
        ("cosmoflow", {"launcher": "torchrum"}, "unknown launcher 'torchrum'"),
        ("cosmoflow", {"launcher": "torchrum"}, "did you mean 'torchrun'"),
        (
            "cosmoflow",
            {"cuda_graphs": True},
            "t.py::test_it: cuda_graphs: cpu has no CUDA graphs; only cuda and rocm have",
        ),
        ("cosmoflow", {"compile": "max-autotun"}, "'max-autotun' is not one of"),
        ("cosmoflow", {"compile": "max-autotun"}, "did you mean 'max-autotune'?"),
        (
            "command",
            {"argv": ["x"], "metrics": RATE, "judge": ["speed"]},
            "t.py::test_it: judge: not among the metrics: speed",
        ),
        ("storage", {"tuning": "fast"}, "storage has no such field"),
        ("storage", {"file_size": "8 elephants"}, "file_size: '8 elephants' is not a size"),
        ("storage", {"file_size": 1.5}, "file_size: expected bytes, or a size like '64MiB', found 1.5"),
        (
            "storage",
            {"io": "direct", "cache": "warm"},
            "cache: direct I/O reads past the page cache, so that cache='warm' would not be true",
        ),
        (
            "storage",
            {"small_file_size": "1TiB"},
            "held in each rank's memory: 409,600.0 GiB, at most 4 are taken",
        ),
        (
            "storage",
            {"file_size": "8GiB", "block_size": "4GiB"},
            "block_size: two blocks are held in each rank's memory: 8.0 GiB, at most 4 are taken",
        ),
        (
            "collective",
            {"sizes": ["8B", 5]},
            "sizes: 5 bytes are no whole number of float32, of 4 bytes each",
        ),
        ("storage", {"block_size": 8}, "block_size: 8 is less than 64 bytes"),
        ("storage", {"file_size": 1000}, "block_size: file_size=1000 is no multiple of block_size=1048576"),
        (
            "storage",
            {"file_size": 1000, "block_size": 500, "io": "direct"},
            "block_size: block_size=500 is no multiple of 4096",
        ),
        ("storage", {"data": "files"}, "data: means nothing for storage"),
        ("collective", {"sizes": []}, "sizes: is an empty list"),
        ("collective", {"sizes": ["8B", "1elephant"]}, "sizes: '1elephant' is not a size"),
        ("collective", {"sizes": ["1KiB", 1024]}, "names a size twice"),
        ("collective", {"sizes": [2]}, "sizes: 2 is less than 4 bytes"),
        ("collective", {"sizes": "8B"}, "sizes: expected a list of sizes like ['8B', '64MiB'], found '8B'"),
        ("collective", {"devices": 1}, "devices: one rank has nobody to talk to"),
        ("collective", {"operation": "all_redcue"}, "did you mean 'all_reduce'?"),
        ("collective", {"peers": "each"}, "peers: all_reduce is between all ranks"),
        ("collective", {"cache": "cold"}, "cache: means nothing for collective"),
        ("nbody", {"bodies": 1023, "devices": 2}, "bodies: 1023 bodies do not divide over 2 devices"),
        (
            "peaks",
            {"precisions": ["fp32", "fp8"]},
            "precisions: ['fp32', 'fp8']: name some of fp32, tf32, bf16, fp16",
        ),
        ("peaks", {"precisions": []}, "name some of"),
        ("peaks", {"precisions": ["fp32", "fp32"]}, "each once"),
        ("peaks", {"matrix": 8}, "matrix: 8 is less than 64"),
        ("peaks", {"cache": "cold"}, "cache: means nothing for peaks"),
        ("kernels", {"of": "nbody"}, "of: 'nbody'"),
        (
            "kernels",
            {"size": "gigantic"},
            "size: cosmoflow has no preset 'gigantic'; it has smoke, small, reference",
        ),
        ("kernels", {"fields": {"kernel": 2}}, "fields: cosmoflow has no field 'kernel'"),
        ("kernels", {"fields": {"input_size": "big"}}, "fields: input_size: expected int, found 'big'"),
        ("reading", {"fields": {"base_channels": 0}}, "fields: base_channels: 0 is less than 1"),
        ("gradients", {"fields": {"kernel_size": 4}}, "fields: kernel_size: 4 is not one of 3, 2"),
        ("kernels", {"fields": {"global_batch": 8}}, "fields: global_batch is not to be set here"),
        ("kernels", {"fields": {"input_size": 4}}, "fields: input_size=4 leaves nothing after 5 layers"),
        ("gradients", {"devices": 1}, "devices: one rank exchanges nothing; at least 2 are needed"),
        ("reading", {"of": "language_model"}, "of: 'language_model'"),
        (
            "reading",
            {"of": "deepcam", "format": "tfrecord"},
            "format: deepcam has no format 'tfrecord'; it has hdf5",
        ),
        (
            "reading",
            {"path": "/data", "format": "hdf5"},
            "format: is that of a synthetic set; files of path have one",
        ),
        ("reading", {"samples": 1, "devices": 2}, "samples: 1 samples cannot be shared by 2 ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_submitted(problems, workload, fields, text):
    (problem,) = problems(workload, **fields)
    assert text in problem


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metrics": RATE}, "argv: names no program"),
        ({"argv": [], "metrics": RATE}, "argv: names no program"),
        ({"argv": "./bench -n 4", "metrics": RATE}, "expected list, found './bench -n 4'"),
        ({"argv": ["a\0b"], "metrics": RATE}, "holds a NUL character"),
        ({"argv": ["x"]}, "metrics: names no metric, so nothing would be measured"),
        ({"argv": ["x"], "metrics": {"Rate": RATE["rate"]}}, "snake_case"),
        ({"argv": ["x"], "metrics": {"rate": 3}}, "expected a mapping"),
        ({"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "patern": "x"}}}, "did you mean 'pattern'"),
        (
            {"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "unit": "parsecs"}}},
            "unit 'parsecs' is not one of",
        ),
        ({"argv": ["x"], "metrics": {"rate": {"unit": "s"}}}, "better None is not one of"),
        ({"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "pattern": "("}}}, "no regular expression"),
        (
            {"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "pattern": "x"}}},
            "0 groups; exactly one must catch the figure",
        ),
        ({"argv": ["x"], "metrics": RATE, "name": "a\nb"}, "control characters"),
    ],
)
def test_a_command_that_cannot_be_is_refused(problems, fields, text):
    assert text in "\n".join(problems("command", **fields))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("devices", [True, 1.5, "1", [1], float("nan")]),
        ("time_limit", ["soon", True, -1, float("nan"), "0s"]),
    ],
)
def test_a_field_refuses_every_value_that_is_none_of_its_kind(problems, field, values):
    for value in values:
        (problem,) = problems(**{field: value})
        assert field in problem


@pytest.mark.parametrize("value", [None, True, b"x", ["-n"], {"n": 4}, pytest.param(object(), id="object")])
def test_what_is_no_text_number_or_path_in_argv_is_refused_with_its_place(problems, value):
    (problem,) = problems("command", metrics=RATE, argv=["./bench", value])
    assert "argv: element 1 is" in problem
    assert "expected text, a number or a path" in problem


def test_all_problems_are_listed_at_once(problems):
    found = problems(devices=0, precision="fp8", steps="many", preset="smal")
    parts = ["0 is less than 1", "'fp8' is not one of", "expected int, found 'many'", "no preset 'smal'"]
    assert len(found) == len(parts)
    assert [part for part in [*parts, "did you mean 'small'"] if part not in "\n".join(found)] == []


def test_numbers_that_no_machine_takes_are_refused(problems):
    found = problems(loader_workers=1025, steps=10**400, learning_rate=float("inf"))
    assert sorted(text.split(": ", 1)[1] for text in found) == [
        "learning_rate: inf is not finite",
        "loader_workers: 1025 is more than 1024",
        "steps: does not fit into 64 bits",
    ]
