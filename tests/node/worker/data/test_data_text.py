import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.worker.data import formats
from pytest_mlhpc.node.worker.data.dataset_files import DataError
from pytest_mlhpc.node.worker.data.source import TextDataset


def windows(path, context, **options):
    types = (torch.uint8, torch.uint8)
    return TextDataset(formats.open_corpus(path), context, (context, context), types, **options)


def test_the_default_is_the_standard_library():
    files = formats.open_corpus(None).files
    assert {"argparse.py", "pathlib.py"} & {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=5), context=st.integers(1, 12))
def test_windows_cover_all_files_in_order_and_overlap_by_one(tmp_path_factory, parts, context):
    folder = tmp_path_factory.mktemp("text")
    for number, part in enumerate(parts):
        (folder / f"{number}.txt").write_bytes(part)
    whole = b"".join(parts)
    if len(whole) < context + 1:
        return
    data = windows(folder, context)
    inputs, targets = zip(
        *((bytes(x.tolist()), bytes(y.tolist())) for x, y, _ in map(data.__getitem__, range(len(data)))),
        strict=True,
    )
    assert b"".join(inputs) == whole[: len(data) * context]
    assert b"".join(targets) == whole[1 : len(data) * context + 1]
    assert all(target[-1] == following[0] for target, following in zip(targets, inputs[1:], strict=False))


def test_text_in_memory_gives_the_same_windows(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    held = torch.frombuffer(bytearray(formats.open_corpus(tmp_path).read(0, 100)), dtype=torch.uint8)
    of_files, of_memory = windows(tmp_path, 10), windows(tmp_path, 10, whole_text=held)
    for files, memory in zip(
        map(of_files.__getitem__, range(9)), map(of_memory.__getitem__, range(9)), strict=True
    ):
        torch.testing.assert_close((*files[:2], 0.0), memory)


@pytest.mark.parametrize(
    ("content", "error"), [(b"", "holds no text"), (b"12345", "holds 5 bytes of text, one sample needs 129")]
)
def test_too_little_text_is_refused(tmp_path, content, error):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=error):
        windows(tmp_path, 128)


def test_a_set_has_an_end_and_is_refused_when_it_shrinks_under_the_run(tmp_path):
    (tmp_path / "a").write_bytes(bytes(101))
    data = windows(tmp_path / "a", 10)  # a file is a corpus too
    assert len(data) == 10
    with pytest.raises(IndexError):
        data[10]
    (tmp_path / "a").write_bytes(bytes(50))
    with pytest.raises(DataError, match="is shorter than when the run began"):
        data[8]
