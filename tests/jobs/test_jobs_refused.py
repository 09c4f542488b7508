"""What is refused when it is declared, before anything is submitted: for each mistake the words that name it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_values import odd

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.declare import misdeclared
from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.spec import UNIVERSAL
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

RATE = (Metric("rate", r"rate: (\S+)", "items/s"),)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ({"sys": "fast"}, "sys: expected a positive number in the unit of rate (items/s), found 'fast'"),
        ({"sys": True}, "sys: expected a positive number in the unit of rate (items/s), found True"),
        ({"sys": 0}, "sys: expected a positive number in the unit of rate (items/s), found 0"),
        ({"sys": float("inf")}, "sys: expected a positive number in the unit of rate (items/s), found inf"),
        ({"sys": {"part": 1}}, "'sys' is no judged metric"),
        ({"rat": {"sys": 1}}, "'rat' is no judged metric (did you mean 'rate'?)"),
        (180, "expected mapping, found 180"),
    ],
)
def test_a_reference_must_be_a_figure_of_a_judged_metric(problems, reference, text):
    (problem,) = problems("command", command="x", metrics=RATE, reference=reference)
    assert text in problem


def test_a_reference_of_two_metrics_says_of_which_it_is(problems):
    two = (*RATE, Metric("setup", r"setup: (\S+)", "s"))
    (problem,) = problems("command", command="x", metrics=two, reference={"sys": 1})
    assert "does not say of which metric it is, as 2 are judged; write {'rate': {'sys': 180}}" in problem


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
        ("cosmoflow", {"data": "cosmos"}, "neither a data set of sys nor a path (did you mean 'cosmo'?)"),
        (
            "cosmoflow",
            {"devices_per_node": 4, "global_batch": 10},
            "global_batch=10 does not divide over 4 devices",
        ),
        (
            "cosmoflow",
            {"cuda_graphs": True},
            "t.py::test_it: cuda_graphs: cpu has no CUDA graphs; only cuda and rocm have",
        ),
        ("cosmoflow", {"batch_norm_group": 1}, "batch_norm_group: means nothing for cosmoflow"),
        ("language_model", {"batch_norm_group": 1}, "batch_norm_group: means nothing for language_model"),
        (
            "resnet50",
            {"batch_norm_group": 3, "devices_per_node": 4},
            "batch_norm_group=3 does not divide the test's 4 devices",
        ),
        ("resnet50", {"batch_norm_group": 0}, "batch_norm_group: 0 is less than 1"),
        (
            "deepcam",
            {"batch_norm_group": "al"},
            "batch_norm_group: expected a number of ranks or 'all', found 'al'",
        ),
        ("deepcam", {"batch_norm_group": True}, "expected a number of ranks or 'all', found True"),
        ("cosmoflow", {"compile": "max-autotun"}, "'max-autotun' is not one of"),
        ("cosmoflow", {"compile": "max-autotun"}, "did you mean 'max-autotune'?"),
        (
            "command",
            {"command": ["x"], "metrics": RATE, "judge": ["speed"]},
            "t.py::test_it: judge: speed is not among the metrics",
        ),
        (
            "cosmoflow",
            {"judge": ["effective_througput"]},
            "judge: effective_througput is not among the metrics (did you mean 'effective_throughput'?)",
        ),
        (
            "storage",
            {"judge": ["write_bandwith"]},
            "judge: write_bandwith is not among the metrics (did you mean 'write_bandwidth'?)",
        ),
        (
            "collective",
            {"devices_per_node": 2, "sizes": [8, 1024], "judge": ["time_2kib"]},
            "judge: time_2kib is not among the metrics (did you mean 'time_1kib'?)",
        ),
        (
            "peaks",
            {"judge": ["gem_flops_bf16"]},
            "judge: gem_flops_bf16 is not among the metrics (did you mean 'gemm_flops_bf16'?)",
        ),
        (
            "kernels",
            {"judge": ["kernel_time_atention"]},
            "judge: kernel_time_atention is not among the metrics (did you mean 'kernel_time_attention'?)",
        ),
        ("cosmoflow", {"owner": 7}, "owner: expected a text, found 7"),
        ("cosmoflow", {"owner": None}, "owner: cannot be None"),
        ("cosmoflow", {"owner": ["ada"]}, "owner: expected a text, found ['ada']"),
        ("storage", {"owner": "ada\nbob"}, "owner: 'ada\\nbob' is not one line of printable text"),
        ("cosmoflow", {"owner": "\x1b[31mada"}, "owner: '\\x1b[31mada' is not one line of printable text"),
        ("cosmoflow", {"owner": "a" * 201}, "owner: is longer than 200 characters"),
        ("nodes", {"judge": [[]]}, "judge: expected True, False or a list of metrics, found [[]]"),
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
        ("collective", {"devices_per_node": 1}, "devices_per_node: one rank has no partner"),
        ("collective", {"operation": "all_redcue"}, "did you mean 'all_reduce'?"),
        ("collective", {"peers": "each"}, "peers: all_reduce is between all ranks"),
        ("collective", {"cache": "cold"}, "cache: means nothing for collective"),
        (
            "nbody",
            {"bodies": 1023, "devices_per_node": 2},
            "bodies: 1023 bodies do not divide over 2 devices",
        ),
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
        (
            "gradients",
            {"devices_per_node": 1},
            "devices_per_node: one rank exchanges nothing; at least 2 are needed",
        ),
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
        ("reading", {"samples": 1, "devices_per_node": 2}, "samples: 1 samples cannot be shared by 2 ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_submitted(problems, workload, fields, text):
    (problem,) = problems(workload, **fields)
    assert text in problem


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metrics": RATE}, "command: names no program"),
        ({"command": [], "metrics": RATE}, "command: names no program"),
        ({"command": "", "metrics": RATE}, "command: names no program"),
        ({"command": "./bench 'x", "metrics": RATE}, 'command: no closing quotation in "./bench \'x"'),
        ({"command": ["a\0b"], "metrics": RATE}, "holds a NUL character"),
        ({"command": ["x"], "metrics": [3]}, "metrics: expected Metric(name, pattern, unit), found 3"),
        ({"command": ["x"], "metrics": [*RATE, *RATE]}, "metrics: rate: is declared twice"),
        *[
            ({"command": ["x"], "metrics": [Metric("rate", unit="MB/s", **given)]}, f"metrics: rate: {text}")
            for given, text in (
                (
                    {"pattern": "(x)", "extract": abs},
                    "has both pattern and extract; one of them finds the figure",
                ),
                ({"pattern": "(x)", "key": "a", "file": "m.json"}, "has both pattern and key; one of them"),
                (
                    {"extract": abs, "file": "m.json"},
                    "has both file and extract; the function reads files itself",
                ),
                ({"extract": "rate"}, "extract 'rate' is no function; write extract=lambda run: ..."),
                ({"extract": lambda: 1}, "extract "),
                ({"extract": pow}, "extract pow does not take one argument, the run"),
                ({"key": "a"}, "key 'a' is of a file; name that by file='m.json'"),
                (
                    {"file": "../m.json", "key": "a"},
                    "file '../m.json' is no path of one file in the run's folder",
                ),
                ({"file": "*.json", "key": "a"}, "file '*.json' is no path of one file in the run's folder"),
                ({"file": 3}, "file 3 is no path of one file"),
                ({"file": "m.json", "key": ""}, "key '' is no text"),
                (
                    {"file": "md.log", "key": "a"},
                    "file 'md.log' has no keys, as .json, .jsonl, .ndjson, .csv, .tsv have",
                ),
                ({"file": "m.csv"}, "file 'm.csv': say what of it: key=..."),
                ({"file": "md.log"}, "file 'md.log': say what of it: pattern=..."),
            )
        ],
        *(
            ({"command": ["x"], "metrics": [metric]}, text)
            for metric, text in (
                (Metric("Rate", unit="s"), "metrics: Rate: a metric's name is snake_case"),
                (
                    Metric("rate", patern="x"),
                    "metrics: rate: Metric has no 'patern' (did you mean 'pattern'?)",
                ),
                (Metric(), "Metric missing 1 required positional argument: 'name'"),
                (Metric("rate", unit="parsecs"), "unit 'parsecs' is unknown; write one like 1, %, s, ms"),
                (Metric("rate", unit="GiB"), "say better='higher', 'lower' or 'none': it does not follow"),
                (Metric("rate", unit="s", better="more"), "better 'more' is not one of higher, lower, none"),
                (Metric("rate", unit="s", reduce="avg"), "reduce 'avg' is not one of median, min, max"),
                (Metric("rate", unit="s", tolerance=10), "tolerance 10 is no share between 0 and 1"),
                (Metric("rate", "(", "s"), "no regular expression"),
                (Metric("rate", "x", "s"), "0 groups; exactly one must catch the figure"),
            )
        ),
        ({"command": ["x"], "metrics": RATE, "name": "a\nb"}, "control characters"),
    ],
)
def test_a_command_that_cannot_be_is_refused(problems, fields, text):
    assert text in "\n".join(problems("command", **fields))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("devices_per_node", [True, 1.5, "1", [1], float("nan")]),
        ("time_limit", ["soon", True, -1, float("nan"), "0s"]),
    ],
)
def test_a_field_refuses_every_value_that_is_none_of_its_kind(problems, field, values):
    for value in values:
        (problem,) = problems(**{field: value})
        assert field in problem


@pytest.mark.parametrize("value", [None, True, b"x", ["-n"], {"n": 4}, pytest.param(object(), id="object")])
def test_what_is_no_text_number_or_path_in_a_command_is_refused_with_its_place(problems, value):
    (problem,) = problems("command", metrics=RATE, command=["./bench", value])
    assert "command: word 1 is" in problem
    assert "expected text, a number or a path" in problem


def test_all_problems_are_listed_at_once(problems):
    found = problems(devices_per_node=0, precision="fp8", steps="many", preset="smal")
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


FIELDS = sorted(
    {(one.name, field) for one in WORKLOADS for field in (*UNIVERSAL, *one.fields)}
    | {("cosmoflow", "schedul")}
)


@given(st.sampled_from(FIELDS), odd())
def test_any_value_of_any_field_gives_a_job_or_is_refused_with_a_message(declare, field, value):
    workload, name = field
    given_ = {"command": ["./bench"], "metrics": RATE} if workload == "command" else {}
    try:
        spec = declare(workload, **{**given_, name: value})
    except SpecError as error:
        assert "t.py::test_it: " in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert spec.benchmark


def test_a_launcher_is_the_partitions_and_not_a_tests():
    workloads = {workload.name: workload for workload in WORKLOADS}
    (problem,) = misdeclared("t.py:3", "train", "cosmoflow", workloads, {"launcher": "srun"})
    assert str(problem).startswith(
        "t.py:3: launcher: a test has no launcher; name it in the partition's entry of systems.yaml"
    )
