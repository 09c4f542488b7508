"""Test classes of ReFrame as they are read: what they inherit, what hooks set, figures, conditions, and what is not followed."""

import textwrap

import pytest

from pytest_mlhpc.cli.reframe_suite import read_suite, references_in
from pytest_mlhpc.errors import UsageError

BASE = """
import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_after, run_before, sanity_function

OPTIONS = ["--fast"]

class Shared(rfm.RunOnlyRegressionTest):
    executable = "bench"
    executable_opts = OPTIONS
    num_tasks = variable(int, value=4)
    reference = {"hill:cpu": {"rate": (10, -0.1, None, "MB/s")}}

    @run_before("run")
    def add_option(self):
        self.executable_opts += [f"--ranks={self.num_tasks}"]
        self.set_variables("2")

    def set_variables(self, threads):
        self.env_vars["OMP_NUM_THREADS"] = threads

    @sanity_function
    def right(self):
        return sn.assert_found("all right", self.stdout)

    @performance_function("MB/s", perf_key="rate")
    def rate(self):
        return self.figure("rate")

    def figure(self, name, tag=1):
        pattern = name + r": (\\S+)"
        return sn.extractsingle(pattern, self.stdout, tag, float)
"""


@pytest.fixture
def read(tmp_path):
    """Return the tests of a suite whose files have these texts, by the name of the class."""

    def read(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return {test.name: test for test in read_suite(tmp_path).tests}

    return read


def test_a_class_has_what_its_bases_of_other_files_set_and_their_hooks_do(read):
    test = read(
        base=BASE,
        test_one="""
        import reframe as rfm
        from base import Shared

        @rfm.simple_test
        class One(Shared):
            "One bench"
            num_tasks = 8

        @rfm.simple_test
        class Two(Shared):
            def set_variables(self, threads):
                self.env_vars = {"MINE": threads}
        """,
    )
    one, two = test["One"], test["Two"]
    assert (one.kind, one.descr, one.missing, one.unread) == ("run", "One bench", [], [])
    assert one.attributes["executable_opts"] == ["--fast", "--ranks=8"]
    assert one.attributes["env_vars"] == {"OMP_NUM_THREADS": "2"}
    assert two.attributes["executable_opts"] == ["--fast", "--ranks=4"]
    assert two.attributes["env_vars"] == {"MINE": "2"}
    assert one.figures["rate"].found.args == ("rate: (\\S+)", "⟨self.stdout⟩", 1, "⟨float⟩")
    assert (one.figures["rate"].unit, one.sanity.name) == ("MB/s", "assert_found")
    assert [*references_in(one)] == [("hill:cpu", "rate", (10, -0.1, None, "MB/s"))]


def test_older_forms_of_figures_and_conditions_are_read(read):
    test = read(
        old="""
        import reframe as rfm
        import reframe.utility.sanity as sn

        @rfm.simple_test
        class Old(rfm.RegressionTest):
            def __init__(self):
                self.valid_systems = ["*"]
                self.sanity_patterns = sn.assert_found("ok", self.stdout)
                self.perf_patterns = {"a": sn.extractsingle("a (.)", self.stdout, 1, float)}

            @run_before("performance")
            def more(self):
                self.perf_variables["b"] = sn.make_performance_function(sn.extractsingle("b (.)", self.stdout, 1), "s")
        """
    )["Old"]
    assert test.kind == "build and run"
    assert [(one.name, one.unit, one.found.args[0]) for one in test.figures.values()] == [
        ("a", "", "a (.)"),
        ("b", "s", "b (.)"),
    ]
    assert test.sanity.args[0] == "ok"


def test_what_depends_on_the_run_is_listed_or_quoted(read):
    test = read(
        base=BASE,
        hooks="""
        import reframe as rfm
        from base import Shared
        from elsewhere import Mixin

        @rfm.simple_test
        class Hooked(Shared, Mixin):
            size = parameter([1, 2])
            binaries = fixture(Builder, scope="session")
            executable_opts = [size]

            @run_after("setup")
            def depends(self):
                self.num_tasks = self.current_partition.processor.num_cpus
                if self.current_system.name == "hill":
                    self.executable = "other"
                self.skip_if(self.num_tasks > 9)

            @performance_function("s")
            def time(self):
                total = 0
                while total < 1:
                    total += 1
                return total
        """,
    )["Hooked"]
    assert test.missing == ["Mixin"]
    assert (test.parameters, test.fixtures) == ({"size": [1, 2]}, {"binaries": "Builder"})
    assert test.attributes["num_tasks"] == "⟨self.current_partition.processor.num_cpus⟩"
    assert test.attributes["executable_opts"][0] == "⟨self.size⟩"
    assert [one.text for one in test.unread] == [
        "if self.current_system.name == 'hill':",
        "self.skip_if(self.num_tasks > 9)",
    ]
    assert test.figures["time"].found == "⟨time()⟩"


def test_a_constructor_goes_on_with_that_of_its_base_where_it_says_so(read):
    test = read(
        a="""
        import reframe as rfm

        class Base(rfm.RegressionTest):
            def __init__(self, what="x"):
                self.tags = {what}
                if self.current_system.name == "hill":
                    self.modules = ["cdo"]

        @rfm.simple_test
        class Own(Base):
            def __init__(self):
                super().__init__("y")
                self.executable = "cdo"

        @rfm.simple_test
        class Replaced(Base):
            def __init__(self):
                self.executable = "cdo"
        """
    )
    own, replaced = test["Own"], test["Replaced"]
    assert (own.attributes["tags"], own.attributes["executable"]) == (["y"], "cdo")
    assert [one.text for one in own.unread] == ["if self.current_system.name == 'hill':"]
    assert (replaced.attributes["tags"], replaced.unread) == ([], [])


def test_one_class_does_not_change_the_lists_of_another(read):
    tests = read(
        base=BASE,
        more="""
        import reframe as rfm
        from base import Shared

        @rfm.simple_test
        class A(Shared): pass

        @rfm.simple_test
        class B(Shared): pass
        """,
    )
    assert tests["A"].attributes["executable_opts"] == tests["B"].attributes["executable_opts"]


def test_classes_that_inherit_from_each_other_end(read):
    test = read(
        round="""
        import reframe as rfm

        class A(B): pass

        @rfm.simple_test
        class B(A): pass
        """
    )["B"]
    assert test.kind == ""


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "has no file that ends in .py; SUITE is a file or a folder of ReFrame's tests"),
        ({"a": "x = 1"}, "holds no test of ReFrame: no class in 1 file is decorated with @rfm.simple_test"),
        ({"a": ""}, "holds no test of ReFrame"),
        ({"a": "class A: ("}, "is not Python 3: line 1"),
        (
            {"a": "x = (", "b": "x = 1"},
            "in 2 files is decorated with @rfm.simple_test; {folder}/a.py is not Python 3",
        ),
    ],
)
def test_a_folder_without_tests_is_refused(tmp_path, files, text):
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    with pytest.raises(UsageError) as caught:
        read_suite(tmp_path)
    assert text.format(folder=tmp_path) in str(caught.value)


def test_a_suite_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no file or folder"):
        read_suite(tmp_path / "no")


def test_a_file_that_is_no_python_hides_no_other(read, tmp_path):
    assert [
        *read(base=BASE, a="import reframe as rfm\n@rfm.simple_test\nclass A(Shared): pass", b="print 'a'")
    ] == ["A"]
    assert read_suite(tmp_path).unreadable == [f"{tmp_path}/b.py is not Python 3: line 1: {MISSING}"]


MISSING = "Missing parentheses in call to 'print'. Did you mean print(...)?"
