"""Values in the Python of ReFrame's files: what is folded, what is quoted, and that nothing is ever executed."""

import ast

import pytest

from pytest_mlhpc.cli.reframe_python import Scope, fold, follow, follow_module, too_large, unknown_in
from pytest_mlhpc.errors import UsageError


def value_of(text, **names):
    """Return the value of the last line of *text*, an expression."""
    tree = ast.parse(text)
    scope = Scope(names)
    follow(tree.body[:-1], scope)
    return fold(tree.body[-1].value, scope)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("-1.5", -1.5),
        ("[1, *(2, 3)] + ['a']", [1, 2, 3, "a"]),
        ("{**{'a': 1}, 'b': None}", {"a": 1, "b": None}),
        ("x = 'a'\nf'{x}b' + 'c'", "abc"),
        ("'%s:%d' % ('a', 2)", "a:2"),
        ("x = {}\nx['a'] = 1\nx.update(b=2)\nx", {"a": 1, "b": 2}),
        ("x = []\nfor i in (1, 2):\n    x.append(i)\nx", [1, 2]),
        ("if 'gpu' in ['gpu']:\n    x = 1\nelse:\n    x = 2\nx", 1),
        ("import os\nos.path.join('a', 'b')", "a/b"),
        ("import copy\nx = {'a': [1]}\ny = copy.deepcopy(x)\ny['a'].append(2)\nx", {"a": [1]}),
        ("x = {'a': 1}\n[*x.items(), x.get('b', 3)]", [("a", 1), 3]),
        ("', '.join(['a', 'b']).replace('a', 'c').split(', ')", ["c", "b"]),
        ("'yes' if 1 == 1 else 'no'", "yes"),
    ],
)
def test_what_stands_in_a_file_is_folded(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("import os\nos.environ['USER']", "⟨os.environ['USER']⟩"),
        ("[osext.user(), 'b']", ["⟨osext.user()⟩", "b"]),
        ("f'--account={osext.group()}'", "--account=⟨osext.group()⟩"),
        ("{'a': 1}.get(partition.name, 2)", "⟨{'a': 1}.get(partition.name, 2)⟩"),
        ("{'a': 1}[name]", "⟨{'a': 1}[name]⟩"),
        ("'%999999999s' % 'a'", "⟨'%999999999s' % 'a'⟩"),
        ("f'{1:999999999}'", "⟨1⟩"),
        ("10 ** 1000000000", "⟨10 ** 1000000000⟩"),
        ("1 / 0", "⟨1 / 0⟩"),
        ("1e999", "⟨1e309⟩"),
        ("[] * 1000000000", "⟨[] * 1000000000⟩"),
        ("x = 1\nif cluster():\n    x = 2\nx", "⟨x⟩"),
        ("x = [1]\nx.sort(key=f)\nx", [1]),
    ],
)
def test_what_only_running_could_tell_is_quoted(text, value):
    assert value_of(text) == value


def test_a_sum_that_doubles_itself_ends_as_a_quotation():
    grown = value_of("x = ['a']\n" + "x = x + x\n" * 60 + "x")
    assert unknown_in(grown) == "x + x"


def test_lists_that_hold_each_other_many_times_or_themselves_are_too_large():
    """What names the same list twice at each of 60 levels has 2 to the power of 60 parts."""
    assert too_large(value_of("x = ['a']\n" + "x = [x, x]\n" * 60 + "x"))
    assert too_large(value_of("x = {}\nx['a'] = x\nx"))


def test_endless_loops_and_methods_that_call_themselves_are_given_up():
    scope = Scope({})
    follow(
        ast.parse("x = [1]\nfor i in range(10):\n    x.append(i)\nwhile True:\n    x.append(1)").body, scope
    )
    assert [one.line for one in scope.unread] == [2, 4]
    tree = ast.parse("def f(self):\n    return self.f() + self.f()\nself.f()").body
    assert unknown_in(fold(tree[1].value, Scope({}, methods={"f": [(tree[0], {})]})))


def test_no_statement_of_a_file_is_executed(tmp_path):
    path = tmp_path / "evil.py"
    path.write_text(
        f"import os, pathlib\nos.system('touch {tmp_path}/a')\n"
        f"x = [pathlib.Path('{tmp_path}/b').touch(), __import__('os').mkdir('{tmp_path}/c')]\n"
        f"site_configuration = {{'systems': [{{'name': open('{tmp_path}/d', 'w').name}}]}}\n"
    )
    follow_module(path)
    assert [one.name for one in tmp_path.iterdir()] == ["evil.py"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x7fELF\x00\x01", "is not Python 3"),
        (b"\xff\xfe\x00", "is not Python 3"),
        (b"print 'a'", "is not Python 3: line 1"),
        (b"x = " + b"(" * 5000, "is not Python 3"),
        (b"x = " + b"-" * 50_000 + b"1", "x.py is"),
        (b"x = " + b"1 + " * 100_000 + b"1", "x.py is"),
        (b"x = 0x" + b"f" * 20_000, "holds a number of more than 256 bits"),
        (b"#" * (5 << 20), "has more than 4 MiB"),
    ],
    ids=["binary", "no text", "Python 2", "brackets", "signs", "sums", "number", "huge"],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, content, text):
    (tmp_path / "x.py").write_bytes(content)
    with pytest.raises(UsageError, match=text) as caught:
        follow_module(tmp_path / "x.py")
    assert "\n" not in str(caught.value)
