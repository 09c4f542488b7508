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
        pytest.param(
            POD.path("mine/../x", "p?q#r"),
            "/api/v1/namespaces/mine%2F..%2Fx/pods/p%3Fq%23r",
            id="a name that is no name reaches no other path",
        ),
    ],
)
def test_paths_are_those_of_the_api(path, expected):
    assert path == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (JOB, "jobs.batch"),
        (ObjectRef(JOB, "mine", "j"), "jobs.batch mine/j"),
        (ObjectRef(NODE, "", "n"), "nodes n"),
        (JOB.api_version, "batch/v1"),
        (POD.api_version, "v1"),
    ],
)
def test_words_are_those_of_kubectl(words, expected):
    assert str(words) == expected


@pytest.mark.parametrize(
    ("manifest", "names"),
    [
        ({"metadata": {"namespace": "mine", "name": "p", "uid": "u"}}, ("mine", "p", "u")),
        *[
            (odd, ("", "", ""))
            for odd in ({}, {"metadata": None}, {"metadata": []}, {"metadata": {"name": None}})
        ],
    ],
)
def test_an_object_has_its_reference_or_an_empty_one(manifest, names):
    assert ref_of(POD, manifest) == ObjectRef(POD, *names)
