"""Paths and names of what a server has."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.kubernetes.resources import JOB, NODE, POD, ObjectRef, ref_of


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (POD.path("mine"), "/api/v1/namespaces/mine/pods"),
        (POD.path("mine", "p", "log"), "/api/v1/namespaces/mine/pods/p/log"),
        (JOB.path("mine", "j"), "/apis/batch/v1/namespaces/mine/jobs/j"),
        (NODE.path("mine", "n"), "/api/v1/nodes/n"),
    ],
)
def test_paths_are_those_of_the_api(path, expected):
    assert path == expected


def test_a_name_that_is_no_name_reaches_no_other_path():
    assert POD.path("mine/../x", "p?q#r") == "/api/v1/namespaces/mine%2F..%2Fx/pods/p%3Fq%23r"


def test_words_are_those_of_kubectl():
    assert str(JOB) == "jobs.batch"
    assert str(ObjectRef(JOB, "mine", "j")) == "jobs.batch mine/j"
    assert str(ObjectRef(NODE, "", "n")) == "nodes n"
    assert JOB.api_version == "batch/v1"
    assert POD.api_version == "v1"


@pytest.mark.parametrize("manifest", [{}, {"metadata": None}, {"metadata": []}, {"metadata": {"name": None}}])
def test_an_object_without_names_has_an_empty_reference(manifest):
    assert ref_of(POD, manifest) == ObjectRef(POD, "", "", "")


def test_an_object_has_its_reference():
    manifest = {"metadata": {"namespace": "mine", "name": "p", "uid": "u"}}
    assert ref_of(POD, manifest) == ObjectRef(POD, "mine", "p", "u")
