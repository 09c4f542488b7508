"""Who owns a file of tests by CODEOWNERS, whatever that file holds."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.session.owners import MOST_BYTES, MOST_RULES, PLACES, parse_code_owners, read_code_owners

FILE = "suites/training/test_a.py"
SECTIONS = "* @all\n[Docs] @docs\n*.md\n^[Tests][2] @qa @ci\nsuites/\nsuites/io/ @storage\n[DOCS]\nsuites/io/ @late\n"


@pytest.mark.parametrize(
    ("text", "path", "owner"),
    [
        ("* @all", FILE, "@all"),
        ("* @all\n*.py @py\n*.md @md", FILE, "@py"),
        ("*.py @py\n* @all", FILE, "@all"),
        ("* @a b@example.org\t@c/d  # of the group", FILE, "@a, b@example.org, @c/d"),
        ("suites/ @a", FILE, "@a"),
        ("training/ @a", FILE, "@a"),
        ("/training/ @a", FILE, ""),
        ("/suites/training @a", FILE, "@a"),
        ("/suites/* @a", FILE, ""),
        ("/suites/* @a", "suites/test_a.py", "@a"),
        ("/suites/*/test_a.py @a", FILE, "@a"),
        ("/suites/**/test_?.py @a", FILE, "@a"),
        ("/suites/**/test_?.py @a", "suites/test_a.py", "@a"),
        ("/suites/** @a", FILE, "@a"),
        ("test_a.py @a", FILE, "@a"),
        ("training/test_a.py @a", FILE, "@a"),
        ("/test_a.py @a", FILE, ""),
        ("test_*.md @a", FILE, ""),
        ("suites/ @a\nsuites/training/", FILE, ""),
        ("* @a\n!*.py", FILE, ""),
        ("a\\ b/ @a\n\\#c.py @c", "a b/test.py", "@a"),
        ("a\\ b/ @a\n\\#c.py @c", "#c.py", "@c"),
        ("x[1].py @a", "x[1].py", "@a"),
        ("x[1].py @a", "x1.py", ""),
        ("a\\*.py @a", "ab.py", ""),
        ("\n# * @a\n\r\n", FILE, ""),
        (SECTIONS, "README.md", "@all, @docs"),
        (SECTIONS, FILE, "@all, @qa, @ci"),
        (SECTIONS, "suites/io/test_b.py", "@all, @storage, @late"),
    ],
)  # fmt: skip
def test_a_file_has_the_owners_of_the_last_rule_of_each_section_that_matches(text, path, owner):
    found = parse_code_owners(text, "CODEOWNERS", Path("/root"))
    assert (found.of(Path("/root") / path), found.problems) == (owner, ())
    assert found.of(Path("/elsewhere") / path) == ""


def test_the_example_of_the_page_has_the_owners_that_the_page_says():
    page = (Path(__file__).parents[2] / "docs/alerts.md").read_text(encoding="utf-8")
    found = parse_code_owners(page.split("```text\n")[1].split("```")[0], "CODEOWNERS")
    paths = [
        f"suites/{name}.py"
        for name in ("test_a", "test_storage_x", "training/test_a", "training/test_resnet50")
    ]
    owners = ["@hpc/benchmarks", "@hpc/storage, ada@example.org", "@hpc/training", "@hpc/training, @vision"]
    assert ([found.of(Path(path)) for path in paths], found.problems) == (owners, ())


def test_more_owners_than_a_line_holds_are_left_out():
    text = "* " + " ".join(f"@{letter * 60}" for letter in "abcde")
    assert parse_code_owners(text, "").of(Path("x")).split(", ") == [f"@{letter * 60}" for letter in "abc"]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("* @a\n*.py ada", ["C:2: 'ada' is no owner, write @NAME or an address; the line is not used"]),
        ("* @a,@b", ["C:1: '@a,@b' is no owner, write @NAME or an address; the line is not used"]),
        ("* @a\x1b[31m", ["C:1: '@a\\x1b[31m' is no owner, write @NAME or an address; the line is not used"]),
        ("/ @a", ["C:1: the line has no pattern; it is not used"]),
        ("!", ["C:1: the line has no pattern; it is not used"]),
        ("* " + "@a" * 3000, ["C:1: the line is longer than 4096 characters; it is not used"]),
        ("* @a\n" * (MOST_RULES + 1), ["C: has more than 10,000 rules; it names no owner"]),
        ("* a\n" * (MOST_RULES + 1), ["C: has more than 10,000 rules; it names no owner"]),
    ],
)
def test_a_line_that_is_no_rule_is_named_and_the_others_hold(text, problems):
    found = parse_code_owners(text, "C")
    assert list(found.problems) == problems
    assert found.of(Path("test_a.py")) == ("@a" if text.startswith("* @a\n*.py") else "")


def test_of_many_wrong_lines_three_are_named():
    problems = parse_code_owners("* a\n" * 9, "C").problems
    assert ([one[:4] for one in problems[:3]], problems[3:]) == (
        ["C:1:", "C:2:", "C:3:"],
        ("C: 6 more lines are not used",),
    )


PIECES = ("a", "b", "/", "*", "**", "?", "[", "]", "\\", "!", "#", " ", "@a", "^", "\x1b")
LINES = st.lists(st.sampled_from(PIECES)).map("".join)
PATHS = st.lists(st.text(st.sampled_from("ab*?[\\"), min_size=1, max_size=3), min_size=1, max_size=5)


@given(st.lists(LINES, max_size=8).map("\n".join), PATHS.map("/".join))
def test_whatever_a_file_holds_owners_are_one_printable_line(text, path):
    found = parse_code_owners(text, "C")
    owner = found.of(Path(path))
    assert [line for line in (owner, *found.problems) if not line.isprintable()] == []
    assert set(owner.split(", ")) <= {"", *(word for word in text.split() if "@" in word)}


@given(PATHS.map("/".join), st.sampled_from(["/*", "*", "[x]\n*"]))
def test_a_path_that_stands_in_a_file_wins_over_what_came_before(path, before):
    escaped = "".join(f"\\{letter}" if letter in "*?[\\" else letter for letter in path)
    text = f"{before.replace('*', '* @all')}\n/{escaped} @own\n"
    assert parse_code_owners(text, "C").of(Path(path)) == "@own"


def write(folder, place, content="* @a"):
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_first_of_the_usual_places_counts(tmp_path):
    for place in reversed(PLACES):
        write(tmp_path, place, f"* @{place.replace('/', '.')}")
        assert read_code_owners(tmp_path).of(tmp_path / FILE) == f"@{place.replace('/', '.')}"


def test_without_a_file_there_is_no_owner_and_nothing_to_say(tmp_path):
    (tmp_path / "docs").write_text("a file where a folder may be")
    found = read_code_owners(tmp_path)
    assert (found.of(tmp_path / FILE), found.problems) == ("", ())
    write(tmp_path, "CODEOWNERS", b"")
    assert read_code_owners(tmp_path).problems == ()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"* @a\n* @\xff\n", "line 2 is no UTF-8"),
        (b"\0ELF" * 9, "is no text"),
        (b"#" * (MOST_BYTES + 1), "is larger than 3 MiB"),
    ],
)
def test_a_file_that_is_no_text_is_named_and_names_no_owner(tmp_path, content, problem):
    write(tmp_path, ".gitlab/CODEOWNERS", content)
    found = read_code_owners(tmp_path)
    assert found.problems == (f".gitlab/CODEOWNERS: {problem}; it names no owner",)
    assert found.of(tmp_path / FILE) == ""


@pytest.mark.parametrize("kind", ["folder", "fifo", "endless", "circle"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "CODEOWNERS"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, stat.S_IRUSR | stat.S_IWUSR)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else path)
    (problem,) = read_code_owners(tmp_path).problems
    assert problem.startswith("CODEOWNERS: ")
    assert problem.endswith("; it names no owner")
