"""The same computation gives the same bits, whatever the number of threads; and who computes otherwise is named."""

import functools

import pytest
import torch

from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.load import digest
from pytest_mlhpc.node.vet.load.digest import CORE_SIZE, DEVICE_SIZE, EXACT, Digests

CPU = torch.device("cpu")
RIGHT = EXACT[CORE_SIZE]


def good(full: str = "a", exact: str = RIGHT) -> Digests:
    return Digests({exact: 5}, {full: 5})


def test_the_exact_result_is_that_of_whole_numbers() -> None:
    exact, _ = digest.operands(CORE_SIZE)
    whole = digest.exact_chain(exact[0].to(torch.int64), exact[1].to(torch.int64))
    assert digest.digest(whole) == RIGHT


@pytest.mark.servers
def test_the_exact_result_of_devices_is_that_of_products_of_bytes() -> None:
    salts = (1, DEVICE_SIZE**2 + 7)
    current, factor = (digest.small(digest.whole_numbers(DEVICE_SIZE, salt)).to(torch.int8) for salt in salts)
    for _ in range(digest.STEPS - 1):
        current = digest.small(torch._int_mm(current, factor)).to(torch.int8)
    assert digest.digest(torch._int_mm(current, factor)) == EXACT[DEVICE_SIZE]


def test_no_sum_of_the_exact_chain_can_round() -> None:
    assert max(abs(number) for number in (-8, 7)) ** 2 * DEVICE_SIZE < 2**24


def test_one_wrong_element_spreads_to_all() -> None:
    exact, full = digest.operands(CORE_SIZE)
    for chain, (start, factor) in ((digest.exact_chain, exact), (digest.full_chain, full)):
        changed = start.clone()
        changed[3, 5] += 1
        same = chain(start, factor)[3] == chain(changed, factor)[3]
        assert same.float().mean() < 0.2


def test_numbers_of_the_full_chain_stay_as_large_as_they_were() -> None:
    _, (start, factor) = digest.operands(CORE_SIZE)
    result = digest.full_chain(start, factor)
    assert 0.3 < float(result.std()) < 1.2
    assert float(digest.full_chain(start.bfloat16(), factor.bfloat16()).float().std()) > 0.3


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_the_exact_result(request: pytest.FixtureRequest, threads: int) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    exact, _ = digest.operands(CORE_SIZE)
    assert digest.digest(digest.exact_chain(*exact)) == RIGHT


RESTLESS = Digests({RIGHT: 2}, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("of_the_second", "rule", "words"),
    [
        (good(exact="f" * 64), "exact", "no rounding can change"),
        (
            Digests({RIGHT: 9, "f" * 64: 1}, {"a": 10}),
            "steady",
            "2 different results for the same matrix products in 10 repetitions",
        ),
        (RESTLESS, "steady", "2 different results for the same matrix products in 2 repetitions"),
    ],
    ids=["a wrong result", "one wrong result among right ones", "it alone keeps no order"],
)
def test_a_device_that_computes_wrongly_is_named(of_the_second: Digests, rule: str, words: str) -> None:
    (finding,) = digest.wrong(["GPU 0", "GPU 1"], [good(), of_the_second], RIGHT)
    assert (finding.device, finding.rule, finding.severity) == ("GPU 1", rule, Severity.CRITICAL)
    assert words in finding.reason


def test_where_no_device_keeps_an_order_all_are_unknown() -> None:
    findings = digest.wrong(["GPU 0", "GPU 1"], [RESTLESS, RESTLESS], RIGHT)
    assert [each.severity for each in findings] == [Severity.UNKNOWN, Severity.UNKNOWN]


def test_cores_vote_among_themselves() -> None:
    common, (finding,) = digest.vote(["core 0", "core 1", "core 2"], [good("a"), good("b"), good("a")])
    assert common == "a"
    assert (finding.device, finding.rule, finding.severity) == ("core 1", "vote", Severity.CRITICAL)


def test_of_two_cores_that_differ_nobody_knows_which_is_right() -> None:
    common, (finding,) = digest.vote(["core 0", "core 1"], [good("a"), good("b")])
    assert common is None
    assert finding.severity is Severity.UNKNOWN


def test_a_restless_core_has_no_voice() -> None:
    assert digest.vote(["core 0"], [RESTLESS]) == (None, [])
