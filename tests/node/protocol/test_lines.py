"""The codec of worker lines: what goes in comes out, and hostile bytes are faults, never exceptions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.protocol.lines import KINDS, MAX_LINE, Decoder, Fault, Message, encode
from pytest_mlhpc.store.record import FAILURES

RUN, NONCE = "0190-run", "nonce"

bodies = st.dictionaries(
    st.text(max_size=20), st.one_of(st.text(max_size=6000), st.integers(), st.lists(st.text()))
)


def measurement(size: int = 0) -> Message:
    return Message(RUN, NONCE, "measurement", {"text": 'x"\\' * size})


def decoder() -> Decoder:
    return Decoder({RUN: NONCE})


def only_fault(found: list[Message | Fault]) -> Fault:
    assert len(found) == 1
    assert isinstance(found[0], Fault)
    return found[0]


@given(bodies, st.integers(1, 5000))
def test_what_is_encoded_is_decoded_whatever_the_size_of_the_reads(body: dict, size: int) -> None:
    message = Message(RUN, NONCE, "measurement", body)
    data = b"".join(encode(message, 0))
    reader = decoder()
    found = [item for i in range(0, len(data), size) for item in reader.feed(data[i : i + size])]
    assert found == [message]
    assert reader.finish() == []


@given(bodies)
def test_no_line_is_longer_than_4000_bytes(body: dict) -> None:
    assert all(len(line) <= MAX_LINE for line in encode(Message(RUN, NONCE, "measurement", body), 10**12))


@given(st.lists(st.binary(max_size=5000), max_size=8))
def test_hostile_bytes_are_faults_with_known_names(pieces: list[bytes]) -> None:
    reader = decoder()
    found = [item for piece in pieces for item in reader.feed(piece)] + reader.finish()
    assert all(isinstance(item, Fault) and item.outcome in FAILURES for item in found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": json_values | st.just(0),
            "run": json_values | st.just(RUN),
            "nonce": json_values | st.just(NONCE),
            "kind": json_values | st.sampled_from(KINDS),
            "part": json_values | st.just(0),
            "text": json_values | st.just("{}"),
            "count": json_values | st.just(1),
            "sha256": json_values,
            "body": json_values,
        },
    )
)
def test_lines_of_odd_shape_never_raise(data: dict) -> None:
    for item in decoder().feed(json.dumps(data).encode() + b"\n"):
        assert isinstance(item, Message) or item.outcome in FAILURES


def test_a_line_without_an_end_holds_no_memory() -> None:
    reader = decoder()
    faults = [item for _ in range(100) for item in reader.feed(b"x" * 100_000)]
    assert only_fault(faults).text == "a line is longer than 4000 bytes"
    assert len(reader._line) < MAX_LINE


def test_after_a_line_too_long_the_next_one_is_read() -> None:
    reader = decoder()
    reader.feed(b"x" * 9000)
    assert reader.feed(b"xxx\n" + encode(measurement(), 0)[0]) == [measurement()]


def test_a_lost_line_is_named_and_its_message_is_not_delivered() -> None:
    lines = encode(measurement(5000), 0)
    reader = decoder()
    found = [item for line in lines[:1] + lines[2:] for item in reader.feed(line)]
    assert all(isinstance(item, Fault) and item.outcome == "truncated_result" for item in found)
    assert found[0].text == "lines 1 to 1 are missing"


def test_a_changed_byte_in_a_long_message_breaks_its_hash() -> None:
    lines = encode(measurement(5000), 0)
    lines[1] = lines[1].replace(b"text", b"TEXT").replace(b"x", b"y", 1).replace(b"TEXT", b"text")
    found = [item for reader in [decoder()] for line in lines for item in reader.feed(line)]
    assert only_fault(found).text == "the SHA-256 of a measurement message does not match"


def test_a_message_cut_off_is_a_truncated_result() -> None:
    reader = decoder()
    for line in encode(measurement(5000), 0)[:2]:
        assert reader.feed(line) == []
    reader.feed(b'{"n":')
    assert [fault.outcome for fault in reader.finish()] == ["truncated_result", "truncated_result"]


def only_line(kind: str = "end", run: str = RUN, nonce: str = NONCE, number: int = 0) -> bytes:
    (line,) = encode(Message(run, nonce, kind, {"exit": [0]}), number)
    return line


@pytest.mark.parametrize(
    ("lines", "outcome", "text"),
    [
        ([only_line(), only_line()], "duplicate_result", "line 0 came twice"),
        ([only_line("measurement"), only_line("measurement", number=1)], "duplicate_result", ""),
        ([only_line(run="other")], "foreign_result", ""),
        ([only_line(nonce="other")], "foreign_result", ""),
        ([b"[" * 3900 + b"\n"], "truncated_result", "not JSON"),
        ([only_line("measurement").replace(b"[0]", b"NaN")], "truncated_result", ""),
    ],
    ids=["a line again", "a second measurement", "another run's id", "another nonce", "deep nesting", "NaN"],
)
def test_the_last_line_is_a_fault(lines: list[bytes], outcome: str, text: str) -> None:
    reader = decoder()
    *before, last = lines
    assert [found for line in before for found in reader.feed(line) if isinstance(found, Fault)] == []
    fault = only_fault(reader.feed(last))
    assert fault.outcome == outcome
    assert text in fault.text


@pytest.mark.parametrize(
    ("run", "body", "text"),
    [(RUN, {"samples_per_s": float("nan")}, "not JSON compliant"), ("x" * 200, {}, "longer than 128")],
    ids=["NaN", "an id that leaves no room"],
)
def test_the_sender_refuses(run: str, body: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode(Message(run, NONCE, "progress", body), 0)
