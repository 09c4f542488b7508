"""Job scripts and manifests of systems.yaml, as reviewed: ``MLHPC_UPDATE_GOLDEN=1`` with this file writes them."""

import os
from pathlib import Path

import pytest
import yaml
from systems_files import ROOT, mlhpc_systems, previews_of

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("folder", "suffix", "of_slurm"),
    [("slurm", "sh", True), ("scheduler", "sh", False), ("kubernetes", "yaml", False)],
)
def test_what_our_systems_render_to_was_reviewed(folder, suffix, of_slurm):
    shown = previews_of(ROOT / "systems.yaml")
    golden = HERE / folder / "golden"
    texts = {
        name: preview.text
        for name, preview in shown.found.items()
        if preview.suffix == suffix and ("\n#SBATCH " in preview.text) == of_slurm
    }
    if os.environ.get("MLHPC_UPDATE_GOLDEN"):
        for old in golden.glob(f"*.{suffix}"):
            old.unlink()
        for name, text in texts.items():
            (golden / f"{name}.{suffix}").write_text(text)
    assert shown.notes == ()
    assert texts == {path.stem: path.read_text() for path in golden.glob(f"*.{suffix}")}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "systems.yaml"


@pytest.fixture
def check(file, capsys):
    """Write a systems file with a part of it replaced, and check it; return exit code, output and errors."""

    def run(*argv, old="", new="", source="slurm"):
        file.write_text((HERE / f"systems_files_data/{source}.yaml").read_text().replace(old, new))
        return mlhpc_systems("check", *argv), *capsys.readouterr()

    return run


def test_check_counts_the_scripts_it_rendered(file, check):
    where = f"{file}:7: systems.mine.partitions.one.slurm.account"
    lines = [
        f"note: {where}: the environment variable MY_ACCOUNT is not set",
        f"{file}: 2 systems, 6 job scripts, no problem",
    ]
    assert check() == (0, "\n".join([*lines, ""]), "")


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        pytest.param(
            "partition: short", 'partition: "${MY_ACCOUNT}"', "MY_ACCOUNT is not set (needed in 2 places)\n",
            id="a variable that is needed in many places has one note",
        ),
        pytest.param(
            "max: 2", 'max: "${NODES}"', "note: mine:one: not rendered: it needs variables that are not set\n",
            id="a partition that needs variables for its shape is named",
        ),
    ],
)  # fmt: skip
def test_what_is_not_set_is_noted(check, old, new, note):
    code, out, _ = check(old=old, new=new)
    assert (code, note in out) == (0, True)


def test_one_script_is_printed_as_it_is(check):
    code, out, _ = check("--render", "mine:two", old=', other: {python: python3, setup: "true"}')
    assert code == 0
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=mlhpc-ALLOCATION\n#SBATCH --partition=short\n")
    assert '#SBATCH --account="${MY_ACCOUNT}"\n' in out


def test_several_scripts_are_told_apart(check):
    code, out, _ = check("--render", "old")
    heads = [line for line in out.splitlines() if line.startswith("#####")]
    assert (code, heads) == (0, ["##### old.three.default", "##### old.three.other"])


@pytest.mark.parametrize(
    ("source", "arguments", "files"),
    [
        ("slurm", ["--render", "mine:one"], ["mine.one.default.sh", "mine.one.other.sh"]),
        ("both", [], ["mine.one.default.yaml", "mine.two.default.sh"]),
    ],
)
def test_previews_are_written_to_a_folder(check, tmp_path, source, arguments, files):
    assert check(*arguments, "--output", "to/here", source=source)[0] == 0
    assert sorted(path.name for path in (tmp_path / "to/here").iterdir()) == files


def test_manifests_are_printed_and_counted_beside_job_scripts(check):
    code, out, _ = check(source="both")
    assert code == 0
    assert out.splitlines()[-1].endswith("systems.yaml: 1 system, 1 job script, 1 manifest, no problem")
    (job,) = yaml.safe_load_all(check("--render", "mine:one", source="both")[1])
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "${IMAGE}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--output", "{file}/x"], "{file}/x: cannot be written: Not a directory\n"),
        (
            ["--render", "mime"],
            "{file}: unknown system 'mime' (did you mean 'mine'?); known: mine, old, local\n",
        ),
        (["--render", "mine:thre"], "{file}: 'mine:thre' has no partition to render\n"),
    ],
)
def test_what_cannot_be_shown_is_named(check, file, arguments, text):
    code, _, error = check(*[word.format(file=file) for word in arguments])
    assert (code, error) == (2, "Error: " + text.format(file=file))


@pytest.mark.parametrize(
    ("setup", "complaint"),
    [
        ("if true; then", "unexpected end of file"),
        ("echo 'a", "syntax error"),
        ("cat <<X", "here-document"),
    ],
)
def test_a_setup_that_bash_cannot_read_is_a_problem(file, check, setup, complaint):
    code, _, error = check(old='"true"', new=f'"{setup}"')
    text = f"Error: {file}:4: systems.mine.partitions.one: environment other: bash cannot read the job script; look at `setup`: "
    assert (code, error[: len(text)]) == (2, text)
    assert complaint in error
