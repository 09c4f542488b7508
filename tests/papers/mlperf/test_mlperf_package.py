"""`mlhpc papers mlperf package` writes what the real package checker accepts, and refuses what it would reject."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from trained_runs import FACTS, events, record

from pytest_mlhpc.papers.mlperf import package
from pytest_mlhpc.papers.mlperf.logs import Submission
from pytest_mlhpc.papers.mlperf.results import groups
from pytest_mlhpc.papers.mlperf.trained import sort_out

SOFTWARE = {
    "torch": "2.13.0",
    "python": "3.11.7",
    "cuda": "13.0",
    "kernel": "6.12.0",
    "cpu_model": "AMD EPYC 7742",
}
DESCRIPTION = {
    "host_processors_per_node": 2, "host_processor_core_count": 64, "host_memory_capacity": "256 GB",
    "host_storage_type": "NVMe", "host_storage_capacity": "1.6 TB", "host_networking": "Slingshot",
    "host_networking_topology": "dragonfly", "host_memory_configuration": "16 x 16 GB", "cooling": "liquid",
    "accelerator_host_interconnect": "PCIe 4.0 x16", "accelerator_memory_configuration": "HBM2e",
    "accelerator_memory_capacity": "80 GB", "accelerator_interconnect": "NVLink",
}  # fmt: skip
#: Training epochs that the reference needs at a batch of 32, and more: what is slower is never refused.
EPOCHS = 9
SYSTEM = "cirrus-standard_2x4"


def runs(workload="cosmoflow", number=10, *, first=1, epochs=EPOCHS, **changes):
    """Return so many repeated runs, of two nodes with four devices each."""
    changes = {
        "devices": 8,
        "nodes": 2,
        "software": SOFTWARE,
        "told": events(workload, epochs=epochs),
        **changes,
    }
    seeds = range(1, number + 1)
    return [record(first + seed, workload, parameters={"seed": seed}, **changes) for seed in seeds]


COSMOFLOW, DEEPCAM = runs(), runs("deepcam", 5, first=20, name="test_deepcam")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "EPCC"


@pytest.fixture
def packed(store, output, mlhpc):
    """Return what stores runs and packs them by the command, with what is known of the system."""

    def pack(*records, division="closed", code=0, described=DESCRIPTION, words=()):
        store(*records)
        description = output.with_name("cirrus.yaml")
        description.write_text(yaml.safe_dump(described))
        asked = [
            "--since",
            "2020-01-01",
            "--org",
            "EPCC",
            "--division",
            division,
            "--description",
            description,
        ]
        return mlhpc("papers", "mlperf", "package", *asked, *words, "--output", output, code=code)

    return pack


@pytest.fixture
def written(output):
    """Return what writes the package of runs without having it checked."""

    def write(*records, status="research", platform="cirrus:standard", described=DESCRIPTION):
        submission = Submission("EPCC", platform, "closed", status)
        runs = package.packaged(groups(sort_out(records).runs), submission)
        known = {name: str(value) for name, value in described.items()}
        package.write_package(output, package.files_of(runs, submission, known))

    return write


def test_ten_runs_of_cosmoflow_and_five_of_deepcam_are_a_package_that_the_checker_accepts(packed, output):
    out = packed(*COSMOFLOW, *DEEPCAM).out
    assert f"{output}: accepted\n" in out
    assert out.endswith("1 package by the rules of hpc 3.0.0: 1 accepted, 0 rejected\n")
    assert out.count("RCP Test Passed") == 2


def test_a_package_has_the_layout_of_the_rules(written, output):
    written(*COSMOFLOW, *DEEPCAM)
    assert {path.name for path in output.iterdir()} == {"systems", "benchmarks", "results"}
    assert [path.name for path in (output / "systems").iterdir()] == [f"{SYSTEM}.json"]
    for workload, number in (("cosmoflow", 10), ("deepcam", 5)):
        results = output / "results" / SYSTEM / "strong" / workload
        assert {path.name for path in results.iterdir()} == {f"result_{at}.txt" for at in range(number)}
        scripts = {"README.md", "setup.sh", "init_datasets.sh", "run_and_time.sh"}
        here = output / "benchmarks" / workload / SYSTEM
        assert {path.name for path in here.iterdir()} == scripts | {f"{SYSTEM}_pytest-mlhpc.json"}
        code = output / "benchmarks" / workload / "implementations" / "pytest-mlhpc"
        assert {path.name for path in code.iterdir()} == {
            f"test_{workload}.py",
            "training.json",
            "requirements.txt",
        }
    assert not [path for path in output.rglob("*") if " " in path.name or path.name.startswith(".")]


def test_the_system_is_described_by_records_options_and_the_file(written, output):
    written(*COSMOFLOW, status="onprem")
    described = json.loads((output / "systems" / f"{SYSTEM}.json").read_text())
    expected = {
        "submitter": "EPCC", "division": "closed", "status": "onprem", "system_name": SYSTEM, "number_of_nodes": "2",
        "accelerators_per_node": "4", "host_processor_model_name": "AMD EPYC 7742", "host_processor_core_count": "64",
        "framework": "PyTorch 2.13.0", "other_software_stack": "Python 3.11.7, CUDA 13.0", "operating_system": "Linux 6.12.0",
        "cooling": "liquid", "hw_notes": "",
    }  # fmt: skip
    assert {name: described[name] for name in expected} == expected
    assert {type(value) for value in described.values()} == {str}


def test_a_file_goes_before_what_a_record_knows_of_the_system(written, output):
    written(
        *COSMOFLOW, described={**DESCRIPTION, "operating_system": "RHEL 8.9", "hw_notes": "one blade lent"}
    )
    described = json.loads((output / "systems" / f"{SYSTEM}.json").read_text())
    assert (described["operating_system"], described["hw_notes"]) == ("RHEL 8.9", "one blade lent")


def test_the_implementation_holds_the_fields_of_the_test_and_all_seeds(written, output):
    asked = {"until": "quality", "global_batch": 32, "seed": 1, "data": "cosmoflow"}
    written(*runs(asked=asked, options=("--mlhpc-preset", "reference")))
    here = output / "benchmarks" / "cosmoflow"
    training = json.loads((here / "implementations" / "pytest-mlhpc" / "training.json").read_text())
    fields = {"until": "quality", "global_batch": 32, "data": "cosmoflow"}
    assert training == {"workload": "cosmoflow", "fields": fields, "seeds": [*range(1, 11)]}
    readme = (here / SYSTEM / "README.md").read_text()
    assert "    sh run_and_time.sh --mlhpc-preset reference --system cirrus:standard\n" in readme


def test_runs_on_made_data_are_accepted_as_open_and_the_readme_names_the_departure(packed, output):
    small = {"data_kind": "synthetic", "told": events("deepcam", counts=(48, 8), epochs=2)}
    out = packed(*runs("deepcam", 5, **small), division="open").out
    assert (f"{output}: accepted\n" in out, "by the rules these runs belong in no division" in out) == (
        True,
        True,
    )
    readme = (output / "benchmarks" / "deepcam" / SYSTEM / "README.md").read_text()
    assert "- 48 training samples, not 121,266 (Training rules, 'Training and Test Sets')\n" in readme


def test_runs_that_need_too_few_epochs_are_no_closed_result(packed, output):
    out = packed(*runs(epochs=3), code=1).out
    assert (f"{output}: rejected\n  RCP Test Failed" in out, "belongs in the open division" in out) == (
        True,
        True,
    )


def test_a_score_that_is_to_be_normalised_has_its_factor_in_the_package(packed, output):
    mixed = [
        runs("deepcam", 5, epochs=7, told=events("deepcam", epochs=epochs))[at]
        for at, epochs in enumerate((7, 7, 7, 6, 6))
    ]
    out = packed(*[replace(one, parameters={**one.parameters, "global_batch": 128}) for one in mixed]).out
    scaling = json.loads((output / "results" / SYSTEM / "strong" / "deepcam" / "scaling.json").read_text())
    assert 1 < scaling["scaling_factor"] < 1.1
    assert "Results scaling set to normalization factor of 1.0" in out


#: What is changed in a package -> what the checker then says.
PLANTED = {
    "a log is missing": (lambda logs: logs[-1].unlink(), "found 9, expected 10"),
    "two targets are missed": (
        lambda logs: [plant(path, '"value": 0.12,', '"value": 0.3,') for path in logs[:2]],
        "2 files do not comply, directory cannot be accepted\n  Failed checks for eval_error : v['value'] <= 0.124",
    ),
    "a seed is repeated": (
        lambda logs: plant(logs[1], '"key": "seed", "value": 2', '"key": "seed", "value": 1'),
        "already logs the same seed on the same line",
    ),
    "a log has no seed": (lambda logs: plant(logs[1], '"key": "seed"', '"key": "mlhpc_seed"'), "logs no seed"),
    "nothing describes the system": (lambda logs: system_of(logs).unlink(), "ended with FileNotFoundError"),
    "a field is missing": (
        lambda logs: plant(system_of(logs), '  "cooling": "liquid",\n', ""),
        f"System description checker failed for {SYSTEM} : ['Missing field cooling']\n  System description file checker failed\n1 package",
    ),
}  # fmt: skip


def plant(path, old, new):
    """Change a file of the package."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def system_of(logs):
    return logs[0].parents[4] / "systems" / f"{SYSTEM}.json"


@pytest.mark.parametrize(("change", "reason"), PLANTED.values(), ids=PLANTED)
def test_a_package_with_a_planted_violation_is_rejected(written, output, mlhpc, change, reason):
    written(*COSMOFLOW)
    logs = sorted((output / "results" / SYSTEM / "strong" / "cosmoflow").iterdir())
    change(logs)
    out = mlhpc("papers", "mlperf", "check", output, code=1).out
    assert (out.startswith(f"{output}: rejected\n"), reason in out) == (True, True), out


def test_one_run_that_missed_its_target_is_accepted_with_a_remark(written, output, mlhpc):
    written(*COSMOFLOW)
    plant(
        output / "results" / SYSTEM / "strong" / "cosmoflow" / "result_3.txt",
        '"value": 0.12,',
        '"value": 0.3,',
    )
    out = mlhpc("papers", "mlperf", "check", output).out
    assert "  1 file does not comply, accepting this under olympic scoring\n" in out


def without(key):
    """Return what runs tell that do not tell *key*."""
    facts = {name: value for name, value in FACTS["cosmoflow"].items() if name != key}
    return events(epochs=EPOCHS, facts=facts)


#: Runs that are no submission -> what is said.
REFUSED = {
    "too few": (runs(number=9), "9 of the 10 runs that the rules want; run the others, each with a seed of its own: @pytest.mark"),
    "too many": (
        [*COSMOFLOW, record(30, parameters={"seed": 11}, devices=8, nodes=2, software=SOFTWARE, told=events(epochs=EPOCHS))],
        "11 runs, where the rules want 10 and none may be chosen; leave older ones out by --since",
    ),
    "no seed": (
        [replace(one, parameters={**one.parameters, "seed": None}) for one in COSMOFLOW],
        '10 runs without a seed; give each its own: @pytest.mark.parametrize("seed", range(1, 11))',
    ),
    "repeated seeds": (
        [replace(one, parameters={**one.parameters, "seed": 4}) for one in COSMOFLOW],
        "several runs have the seed 4; give each its own",
    ),
    "a seed of zero": (
        [replace(COSMOFLOW[0], parameters={**COSMOFLOW[0].parameters, "seed": 0}), *COSMOFLOW[1:]],
        "a seed must be above 0, not 0; take @pytest.mark.parametrize",
    ),
    "no learning rate": (
        runs(told=without("opt_base_learning_rate")),
        "the records lack the hyperparameters opt_base_learning_rate, which the closed division asks for; run again",
    ),
    "a run without a log": (
        [*COSMOFLOW[:9], replace(COSMOFLOW[9], verdict="target_missed", measurement=None)],
        "(target_missed) has no events, so no log; run all anew with a larger max_epochs",
    ),
    "two machines": (
        [*COSMOFLOW, *(replace(one, system="archer2") for one in DEEPCAM)],
        "a package describes one machine, not archer2:standard, cirrus:standard; choose by --system",
    ),
    "two trainings": (
        [*COSMOFLOW, *runs(first=40, name="test_again")],
        f"2 trainings of cosmoflow on {SYSTEM}: a package has one; choose by --benchmark",
    ),
    "two releases of torch": (
        [*COSMOFLOW[:9], runs(software={**SOFTWARE, "torch": "2.12.0"})[9]],
        "runs with torch 2.12.0 and 2.13.0; a result is of one software, choose by --since",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_rejected_is_refused_with_what_to_do(packed, output, records, reason):
    err = packed(*records, code=2).err
    assert (reason in err, output.exists()) == (True, False), err


def test_all_that_is_missing_is_said_at_once(packed):
    err = packed(
        *runs(number=3, told=without("opt_base_learning_rate")),
        *runs("deepcam", 4, first=20, name="test_d"),
        code=2,
    ).err
    assert [
        one for one in ("3 of the 10 runs", "opt_base_learning_rate", "4 of the 5 runs") if one not in err
    ] == []


def test_fields_of_the_system_that_nobody_knows_are_named_as_the_file_has_them(packed, output):
    some = {name: value for name, value in DESCRIPTION.items() if name not in {"cooling", "host_networking"}}
    err = packed(*COSMOFLOW, described=some, code=2).err
    assert f"the description of {SYSTEM} lacks 2 fields that no record knows" in err
    assert "--description:\n  host_networking: ...\n  cooling: ...\n" in err
    assert not output.exists()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("number_of_nodes", 4, "number_of_nodes: the options and the records say it; remove it"),
        ("colour", "red", "colour: no field of a system's description"),
        ("cooling", ["air"], "cooling: must be a text or a number"),
        ("cooling", True, "cooling: must be a text or a number"),
    ],
)
def test_a_wrong_description_is_refused_with_its_line(packed, field, value, reason):
    err = packed(*COSMOFLOW, described={**DESCRIPTION, field: value}, code=2).err
    assert re.search(rf"cirrus\.yaml:\d+: {reason}", err), err


def test_a_processor_without_accelerators_needs_no_description_of_them(written, output):
    some = {name: value for name, value in DESCRIPTION.items() if not name.startswith("accelerator")}
    written(*runs(device_type="cpu"), described=some)
    described = json.loads((output / "systems" / f"{SYSTEM}.json").read_text())
    assert (described["accelerators_per_node"], described["accelerator_model_name"]) == ("0", "")


def test_a_folder_that_is_there_is_never_written_into(packed, output):
    output.mkdir()
    assert "is there already; name another folder by --output, or remove it" in packed(*COSMOFLOW, code=2).err
    assert list(output.iterdir()) == []


def test_a_package_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(package.StoreError, match=r"the package cannot be written: File name too long"):
        package.write_package(tmp_path / "P", {"a/b.txt": "", "c" * 300: ""})
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_a_platform_becomes_one_that_git_and_a_path_can_hold(written, output):
    written(*COSMOFLOW, platform="../Cirrus / GPU")
    assert [path.name for path in (output / "systems").iterdir()] == ["Cirrus-GPU_2x4.json"]


def test_the_checkers_own_rules_say_which_hyperparameters_a_log_must_have():
    (one,) = package.packaged(groups(sort_out(DEEPCAM).runs), Submission("EPCC", "c", "closed"))
    keys = package.required_keys("deepcam", "closed", one.entries[0])
    assert {"opt_lr", "scheduler_milestones", "batchnorm_group_size", "seed"} <= {*keys}
    assert package.required_keys("deepcam", "open", one.entries[0]) == ()


def test_where_nothing_is_recorded_nothing_is_written(packed, output):
    assert "no run to a quality target is recorded" in packed().out
    assert not output.exists()


def test_the_scripts_are_constant_and_can_be_run(written, output):
    written(*COSMOFLOW)
    here = Path(output / "benchmarks" / "cosmoflow" / SYSTEM)
    for name in ("setup.sh", "init_datasets.sh", "run_and_time.sh"):
        assert (here / name).stat().st_mode & 0o111
        assert SYSTEM not in (here / name).read_text()
