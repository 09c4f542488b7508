"""The hour of tests/test_walk.py on the login node of a real Slurm: its questions are answered, and jobs are judged there."""

import re

from installed_wheel import find_a_slower_program, printed


def test_a_slower_program_is_found_on_a_cluster_once_its_questions_are_answered(slurm, installed, stranger):
    said = stranger.type("mlhpc init")
    systems = stranger.folder / "systems.yaml"
    text = systems.read_text()
    assert re.findall(r"export (\w+)=", text) == ["MLHPC_ACCOUNT", "MLHPC_STATE"]
    assert "variable MLHPC_ACCOUNT is not set" in stranger.type("mlhpc systems check")
    stranger.variables |= {"MLHPC_ACCOUNT": "bench", "MLHPC_STATE": f"{stranger.folder}/mlhpc"}
    systems.write_text(text.replace("python: python3", f"python: {installed}/bin/python"))
    assert "note" not in stranger.type("mlhpc systems check")
    command = printed(said, "once the questions in systems.yaml are answered")
    find_a_slower_program(
        stranger, f"{command}:cpu", "cluster:cpu"
    )  # the GPUs of its other partition are pretended
