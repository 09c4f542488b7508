"""The JSON Schema for editors is fresh, and agrees with the loader."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pytest_mlhpc.config.schema import PATH, json_schema

ROOT = Path(__file__).parents[2]


def valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(json.loads(PATH.read_text())).is_valid(yaml.safe_load(text))


def test_the_schema_in_the_package_is_fresh():
    assert PATH.read_text() == json_schema(), "run: python -m pytest_mlhpc.config.schema --write"


def test_the_schema_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(json.loads(PATH.read_text()))


@pytest.mark.parametrize(
    "path",
    [ROOT / "systems.yaml", PATH.with_name("builtin.yaml"), *sorted(PATH.with_name("known").glob("*.yaml"))],
    ids=lambda path: path.name,
)
def test_our_own_files_fit(path: Path):
    assert valid(path.read_text())


def test_what_the_loader_takes_fits():
    assert valid(
        "systems: {a: {partitions: {p: {scheduler: slurm, slurm: {qos: x}, time_limit: 1h, max_jobs: '${N}',"
        " nodes: {cores: '${CORES}', memory: 1GiB}, environments: {d: {container: x.sif, uenv: {image: y}}}}}}}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "sistems: {}",
        "systems: {a: {partitions: {p: {scheduler: local, max_jbs: 3}}}}",
        "systems: {a: {partitions: {p: {scheduler: local, accelerator: gpu}}}}",
        "systems: {a: {partitions: {p: {}}}}",
        "systems: {a: {partitions: {}}}",
    ],
)
def test_what_the_loader_refuses_does_not_fit(text):
    assert not valid(text)
