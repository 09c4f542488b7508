from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_mlhpc.worker.data import text
from pytest_mlhpc.worker.data.datasets import TextDataset
from pytest_mlhpc.worker.data.errors import DataError

BYTES = (torch.uint8, torch.uint8)


def test_the_default_is_the_standard_library():
    names = {file.name for file in text.corpus(None).files}
    assert {"argparse.py", "pathlib.py"} & names
    assert not any("site-packages" in file.parts for file in text.corpus(None).files)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=5), context=st.integers(1, 12))
def test_windows_cover_all_files_in_order_and_overlap_by_one(tmp_path_factory, parts, context):
    folder = tmp_path_factory.mktemp("text")
    for number, part in enumerate(parts):
        (folder / f"{number}.txt").write_bytes(part)
    whole = b"".join(parts)
    if len(whole) < context + 1:
        return
    data = TextDataset(text.corpus(folder), context, (context, context), BYTES)
    samples = [data[index] for index in range(len(data))]
    assert b"".join(bytes(x.tolist()) for x, _, _ in samples) == whole[: len(data) * context]
    assert all(
        bytes(y.tolist()) == whole[i * context + 1 : (i + 1) * context + 1]
        for i, (_, y, _) in enumerate(samples)
    )
    assert all(before[1][-1] == after[0][0] for before, after in pairwise(samples))


def test_text_held_in_memory_gives_the_same_windows(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    corpus = text.corpus(tmp_path)
    held = torch.frombuffer(bytearray(corpus.read(0, 100)), dtype=torch.uint8)
    for index in range(9):
        files = TextDataset(corpus, 10, (10, 10), BYTES)[index]
        memory = TextDataset(corpus, 10, (10, 10), BYTES, held=held)[index]
        assert (files[0] == memory[0]).all()
        assert (files[1] == memory[1]).all()
        assert memory[2] == 0.0


def test_a_file_is_a_corpus_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello world")
    assert text.corpus(tmp_path / "a.txt").size == 11


def test_no_text_is_told(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="holds no text"):
        text.corpus(tmp_path)


def test_too_little_text_is_told(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(DataError, match="holds 5 bytes of text, one sample needs 129"):
        TextDataset(text.corpus(tmp_path), 128, (128, 128), BYTES)


def test_a_file_that_shrinks_under_the_run_is_told(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    data = TextDataset(text.corpus(tmp_path), 10, (10, 10), BYTES)
    (tmp_path / "a").write_bytes(bytes(50))
    with pytest.raises(DataError, match="is shorter than when the run began"):
        data[8]


def test_the_end_of_a_set_is_an_index_error(tmp_path):
    (tmp_path / "a").write_bytes(bytes(101))
    data = TextDataset(text.corpus(tmp_path), 10, (10, 10), BYTES)
    assert len(data) == 10
    with pytest.raises(IndexError):
        data[10]
