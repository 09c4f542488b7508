"""Files that people or enemies wrote: each problem has its line, nothing runs, nothing explodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.errors import ConfigError
from pytest_mlhpc.system.yaml_reader import MAX_BYTES, MAX_NODES, read_bytes, read_file


def refused(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        read_bytes(data, "f.yaml")
    return str(caught.value)


def plain(text: str):
    return read_bytes(text.encode(), "f.yaml").plain()


def test_every_key_knows_its_line_and_path():
    root = read_bytes(b"a:\n  b:\n\n    - x\n    - c: 1\n", "f.yaml")
    item = root.get("a").get("b").value[1]
    assert (item.get("c").where, item.get("c").key) == ("f.yaml:5", "a.b[1].c")


def test_scalars_follow_yaml_1_2():
    text = "{a: off, b: 010, c: 2025-01-31, d: 1:30, e: true, f: 3, g: -0.5, h: null, i: 'yes', j: 0x10, k: .inf}"
    assert plain(text) == {
        "a": "off",
        "b": "010",
        "c": "2025-01-31",
        "d": "1:30",
        "e": True,
        "f": 3,
        "g": -0.5,
        "h": None,
        "i": "yes",
        "j": "0x10",
        "k": ".inf",
    }


def test_a_quoted_number_stays_text():
    assert plain("a: '3'") == {"a": "3"}


def test_an_alias_repeats_its_value():
    assert plain("a: &x {n: 1}\nb: *x\n") == {"a": {"n": 1}, "b": {"n": 1}}


def test_a_byte_order_mark_is_no_problem():
    assert read_bytes("a: 1".encode("utf-8-sig"), "f").plain() == {"a": 1}


def test_a_duplicate_key_is_named_with_both_lines():
    text = refused("a:\n  x: 1\n  y: 2\n  x: 3\n")
    assert text == "f.yaml:4: a.x: is given twice, first in line 2"


def test_all_duplicate_keys_are_named_at_once():
    assert refused("a: 1\na: 2\nb: 1\nb: 2\n").count("is given twice") == 2


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n"])
def test_an_empty_file_is_called_empty(text):
    assert "is empty" in refused(text)


@pytest.mark.parametrize("text", ["just words", "- a\n- b\n", "3", "true"])
def test_a_file_that_is_no_mapping_is_refused(text):
    assert "should be a mapping" in refused(text)


def test_tabs_are_named_with_their_lines():
    text = refused("a:\n\tb: 1\n\tc: 2\n")
    assert "f.yaml:2: a tab is used for indentation" in text
    assert "f.yaml:3: a tab" in text


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
    text = refused(f"a:\n  b: {value}\n")
    assert "f.yaml:2: a.b: the tag" in text


def test_a_merge_key_is_refused_with_what_to_use_instead():
    assert "f.yaml:3: b: merge keys (<<) are not supported" in refused("a: &a {x: 1}\nb:\n  <<: *a\n")


def test_an_alias_bomb_is_refused_before_it_grows():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert f"more than {MAX_NODES:,} values" in refused("\n".join(lines))


def test_an_alias_to_itself_is_refused():
    assert "a value that contains it" in refused("a: &a [*a]\n")


def test_an_alias_to_nothing_is_refused():
    assert "nothing" in refused("a: *nothing\n")


def test_deep_nesting_is_refused():
    assert "nested deeper" in refused("a: " + "[" * 5000 + "]" * 5000)


def test_bytes_that_are_not_utf_8_are_named_with_their_line():
    assert "f.yaml:2: byte 0xff is not UTF-8" in refused(b"a: 1\nb: \xff\n")


@pytest.mark.parametrize("text", ['a: "\\0"', 'a: "\\ud800"', 'a: "\\e[31m"', '"a\\nb": 1', '"\\a": 1'])
def test_control_characters_are_refused(text):
    assert "f.yaml:1" in refused(text)


def test_a_second_document_is_refused():
    assert "f.yaml:2: a second document" in refused("a: 1\n---\nb: 1\n")


def test_a_syntax_error_names_the_line():
    assert refused("a:\n  b: [1, 2\nc: 3\n").startswith("f.yaml:3: this is not YAML")


def test_a_key_that_is_a_list_is_refused():
    assert "a key should be a plain word" in refused("? [a, b]\n: 1\n")


def test_a_file_of_50_megabytes_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(50_000_000)  # reading it would say something of NUL characters
    with pytest.raises(ConfigError, match=r"50,000,000 bytes, more than 1,000,000"):
        read_file(path)


def test_one_byte_over_the_limit_is_refused():
    assert "longer than" in refused(b"#" * (MAX_BYTES + 1))


@pytest.mark.parametrize("name", ["missing.yaml", "nul\0byte.yaml", "."])
def test_what_cannot_be_read_is_named(tmp_path: Path, name):
    with pytest.raises(ConfigError) as caught:
        read_file(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_file(tmp_path / "pipe")


@settings(max_examples=300)
@given(st.text(alphabet="ab:-?[]{}&*!|>'\"%#,~ \t\n0.<\\x", max_size=60))
def test_any_text_gives_a_tree_or_a_config_error(text):
    try:
        root = read_bytes(text.encode(), "f.yaml")
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(root.value, dict)


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_tree_or_a_config_error(data):
    try:
        read_bytes(data, "f.yaml")
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
