"""Files that people or enemies wrote: each problem has its line, nothing runs, nothing explodes."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.config.yaml import MAX_BYTES, MAX_NODES, read_bytes, read_file
from pytest_mlhpc.errors import ConfigError


def refused(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        read_bytes(data, "f.yaml")
    return str(caught.value)


def test_every_key_knows_its_line_and_path():
    root = read_bytes(b"a:\n  b:\n\n    - x\n    - c: 1\n", "f.yaml")
    item = root.get("a").get("b").value[1]
    assert (item.get("c").where, item.get("c").key) == ("f.yaml:5", "a.b[1].c")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"a: [off, 010, 2025-01-31, 1:30]", ["off", "010", "2025-01-31", "1:30"]),
        (b"a: [true, 3, -0.5, null]", [True, 3, -0.5, None]),
        (b"a: ['yes', 0x10, .inf, '3']", ["yes", "0x10", ".inf", "3"]),
        (b"a: [&x {n: 1}, *x]", [{"n": 1}, {"n": 1}]),
        ("a: [1]".encode("utf-8-sig"), [1]),
    ],
    ids=["words of YAML 1.1", "values", "text", "an alias", "behind a byte order mark"],
)
def test_values_follow_yaml_1_2(text, values):
    assert read_bytes(text, "f.yaml").plain() == {"a": values}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "is empty") for text in ("", "\n\n", "# only a comment\n", "---\n", "---\n...\n")),
        *((text, "should be a mapping") for text in ("just words", "- a\n- b\n", "3", "true")),
        *(
            (text, "f.yaml:1")
            for text in ('a: "\\0"', 'a: "\\ud800"', 'a: "\\e[31m"', '"a\\nb": 1', '"\\a": 1')
        ),
    ],
)
def test_a_file_that_is_empty_or_no_mapping_or_has_control_characters_is_refused(text, why):
    assert why in refused(text)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch /tmp/mlhpc-owned']",
        "!!python/name:os.system",
        "!include /etc/passwd",
        "!!binary aGVsbG8=",
        "!<tag:yaml.org,2002:python/module:os> ''",
    ],
)
def test_a_tag_is_refused_and_runs_nothing(value):
    assert "f.yaml:2: a.b: the tag" in refused(f"a:\n  b: {value}\n")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("a:\n  x: 1\n  y: 2\n  x: 3\n", ["f.yaml:4: a.x: is given twice, first in line 2"]),
        ("a: 1\na: 2\nb: 1\nb: 2\n", ["f.yaml:2: a: is given twice", "f.yaml:4: b: is given twice"]),
        ("a:\n\tb: 1\n\tc: 2\n", ["f.yaml:2: a tab is used for indentation", "f.yaml:3: a tab"]),
        ("a: &a {x: 1}\nb:\n  <<: *a\n", ["f.yaml:3: b: merge keys (<<) are not supported"]),
        ("a: &a [*a]\n", ["a value that contains it"]),
        ("a: *nothing\n", ["nothing"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["nested deeper"]),
        (b"a: 1\nb: \xff\n", ["f.yaml:2: byte 0xff is not UTF-8"]),
        ("a: 1\n---\nb: 1\n", ["f.yaml:2: a second document"]),
        ("a:\n  b: [1, 2\nc: 3\n", ["f.yaml:3: this is not YAML"]),
        ("? [a, b]\n: 1\n", ["a key should be a plain word"]),
        (b"#" * (MAX_BYTES + 1), ["longer than"]),
    ],
    ids=[
        "a duplicate key", "two duplicate keys", "tabs", "a merge key", "an alias to itself", "an alias to nothing",
        "deep nesting", "bytes that are not UTF-8", "a second document", "a syntax error", "a key that is a list",
        "one byte over the limit",
    ],
)  # fmt: skip
def test_what_the_reader_does_not_take_is_named_with_its_line(text, problems):
    lines = refused(text).splitlines()
    assert len(lines) == len(problems)
    assert [problem for problem, line in zip(problems, lines, strict=True) if problem not in line] == []


def test_an_alias_bomb_is_refused_before_it_grows():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert f"more than {MAX_NODES:,} values" in refused("\n".join(lines))


def test_a_file_of_50_megabytes_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(50_000_000)  # reading it would say something of NUL characters
    with pytest.raises(ConfigError, match=r"50,000,000 bytes, more than 1,000,000"):
        read_file(path)


@pytest.mark.parametrize("name", ["missing.yaml", "nul\0byte.yaml", "."])
def test_what_cannot_be_read_is_named(tmp_path: Path, name):
    with pytest.raises(ConfigError) as caught:
        read_file(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_file(tmp_path / "pipe")


@given(st.text(alphabet="ab:-?[]{}&*!|>'\"%#,~ \t\n0.<\\x", max_size=60))
def test_any_text_gives_a_tree_or_a_config_error(text):
    try:
        root = read_bytes(text.encode(), "f.yaml")
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(root.value, dict)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_tree_or_a_config_error(data):
    try:
        read_bytes(data, "f.yaml")
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
