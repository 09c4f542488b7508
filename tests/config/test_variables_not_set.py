"""A variable that is not set here takes its own value from what is shown, and nothing else."""

import pytest
import yaml

from pytest_mlhpc.cli import USAGE, main
from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
from pytest_mlhpc.provision.slurm.schema import SlurmOptions

NEEDED = {"kubernetes": {"namespace": "ns", "image": "r/i:1"}, "slurm": {"partition": "cpu"}}
MODELS = {"kubernetes": KubernetesOptions, "slurm": SlurmOptions}
OPTIONS = [(scheduler, option) for scheduler, model in MODELS.items() for option in model.model_fields]


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Check a partition with these options and show its job script or manifest; return exit code and output."""
    monkeypatch.delenv("NOT_SET", raising=False)

    def check(scheduler, **options):
        part = {
            "scheduler": scheduler,
            "accelerator": "cpu",
            "nodes": {"cores": 8, "memory": "16GiB", "max": 4},
            "environments": {"default": {"python": "python3"}},
            scheduler: {**NEEDED[scheduler], **options},
        }
        file = tmp_path / "systems.yaml"
        file.write_text(yaml.safe_dump({"systems": {"mine": {"partitions": {"cpu": part}}}}))
        code = main(["systems", "check", str(file), "--render", "mine"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return check


@pytest.mark.parametrize(("scheduler", "option"), OPTIONS)
def test_an_option_without_its_variable_leaves_the_rest_as_it_is(check, scheduler, option):
    other = {"kubernetes": {"grace": "3s"}, "slurm": {"memory": "4GiB"}}[scheduler]
    text = {"kubernetes": "terminationGracePeriodSeconds: 3\n", "slurm": "#SBATCH --mem=4096M\n"}[scheduler]
    code, shown = check(scheduler, **{**other, option: "${NOT_SET}"})

    if option == "kind":
        assert "mine:cpu: not rendered: it needs variables that are not set" in shown
    else:
        assert code == 0
        assert option in other or text in shown


@pytest.mark.parametrize(("scheduler", "option"), OPTIONS)
@pytest.mark.parametrize("value", [["${NOT_SET}"], {"a": "${NOT_SET}"}], ids=["list", "mapping"])
def test_a_list_or_mapping_of_variables_is_taken_or_refused_by_its_key(check, scheduler, option, value):
    code, text = check(scheduler, **{option: value})

    assert code == 0 or (code == USAGE and f"{scheduler}.{option}" in text)


@pytest.mark.parametrize("scheduler", MODELS)
def test_an_unknown_option_is_refused_whatever_its_value(check, scheduler):
    code, text = check(scheduler, imag="${NOT_SET}")

    assert code == USAGE
    assert f"{scheduler}.imag: unknown key" in text
