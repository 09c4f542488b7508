"""Host lists as Slurm writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.agents.nodes import (
    MAX_NODES,
    HostlistError,
    expand_hostlist,
    number_list,
    number_ranges,
)


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("", []), ("(null)", []), ("None assigned", []),
        ("node1", ["node1"]),
        ("node1,login", ["node1", "login"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-011]", ["n8", "n9", "n10", "n11"]),
        ("a[01-02,3,7-8]", ["a01", "a02", "a3", "a7", "a8"]),
        ("rack[1-2]node[01-02]", ["rack1node01", "rack1node02", "rack2node01", "rack2node02"]),
        ("a[1-2]b[3-4]c[5-6]", ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"]),
        ("n[1-2]-ib,x", ["n1-ib", "n2-ib", "x"]),
        ("b,a,b", ["b", "a", "b"]),
        (" node1 , node2\tn[1-2]\nx ", ["node1", "node2", "n1", "n2", "x"]),
        ("[1-2]", ["1", "2"]),
    ],
)  # fmt: skip
def test_a_host_list_has_these_nodes(hostlist, names):
    assert expand_hostlist(hostlist) == tuple(names)


@pytest.mark.parametrize(
    ("hostlist", "why"),
    [
        ("n[3-1]", "runs backwards"), ("n[1-2", "do not match"), ("n1]", "do not match"), ("n[[1]]", "do not match"),
        ("n[]", "no range"), ("n[1-2-3]", "no range"), ("n[a]", "no range"), ("n[-1]", "no range"),
        ("n[0-99999999]", "more than"), ("a[1-300]b[1-300]", "more than"), ("a[1-999999999999999999999]", "no range"),
    ],
)  # fmt: skip
def test_what_is_no_host_list_is_refused_with_the_reason(hostlist, why):
    with pytest.raises(HostlistError, match=why):
        expand_hostlist(hostlist)


def test_a_list_of_many_huge_ranges_ends_soon():
    with pytest.raises(HostlistError, match=str(MAX_NODES)):
        expand_hostlist(",".join(["n[1-60000]"] * 1000))


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "node", "rack1-"]), st.integers(0, 999), st.integers(0, 20), st.integers(1, 5)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_ranges_expand_to_what_they_were_made_of(parts):
    hostlist = ",".join(f"{name}[{low:0{width}}-{low + more:0{width}}]" for name, low, more, width in parts)
    names = [f"{name}{at:0{width}}" for name, low, more, width in parts for at in range(low, low + more + 1)]
    assert expand_hostlist(hostlist) == tuple(names)


@given(st.text(alphabet="an0123456789[],-", max_size=30))
def test_any_text_expands_or_is_refused(hostlist):
    try:
        names = expand_hostlist(hostlist)
    except HostlistError:
        return
    assert len(names) <= MAX_NODES
    assert not any(set(name) & set("[],") for name in names)


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_a_written_list_of_numbers_is_read_as_it_was(numbers):
    assert set(number_list(",".join(number_ranges(numbers)))) == numbers


def test_neighbours_are_one_range_and_numbers_are_as_wide_as_asked():
    assert number_ranges([8, 0, 1, 2, 3]) == ["0-3", "8"]
    assert number_ranges([9, 10], width=3) == ["009-010"]
    assert number_ranges([]) == []


@pytest.mark.parametrize("text", ["", "3-1", "0-", "a", "1,,2", "0-99999"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(HostlistError):
        number_list(text)
