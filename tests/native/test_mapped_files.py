"""Files that are mapped, and moved to memory while they are read."""

import threading

import pytest
import torch

from parley.native import mapped_files
from parley.native.mapped_files import PIECE, MappedFile


@pytest.fixture
def no_other_files(monkeypatch):
    monkeypatch.setattr(mapped_files, "_waiting", [])


@pytest.mark.parametrize("size", [0, 1, 4097, PIECE, 2 * PIECE + 12345])
def test_data_stay_the_same_while_they_are_moved_to_memory(tmp_path, no_other_files, size):
    expected = torch.randint(0, 256, (size,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(expected.numpy().tobytes())
    file = MappedFile(tmp_path / "file")
    address = file.data.data_ptr()
    assert mapped_files.uncopied_bytes() == size and torch.equal(file.data, expected)

    ended, results = threading.Event(), []

    def read_repeatedly():
        while not ended.is_set():
            results.append(torch.equal(file.data, expected))

    reader = threading.Thread(target=read_repeatedly)
    reader.start()
    mapped_files.start_copying().join()
    ended.set()
    reader.join()
    assert all(results) and torch.equal(file.data, expected) and file.data.data_ptr() == address
    assert mapped_files.uncopied_bytes() == 0 and mapped_files.start_copying() is None


def test_data_no_longer_come_from_the_file_once_they_are_copied(tmp_path, no_other_files):
    path = tmp_path / "file"
    path.write_bytes(b"a" * (PIECE + 9))
    file = MappedFile(path)
    mapped_files.start_copying().join()
    with path.open("r+b") as writer:
        writer.write(b"b" * (PIECE + 9))
    assert torch.equal(file.data, torch.full((PIECE + 9,), ord("a"), dtype=torch.uint8))


def test_what_cannot_be_copied_stays_mapped(tmp_path, no_other_files, caplog):
    path = tmp_path / "file"
    path.write_bytes(b"a" * (2 * PIECE))
    file = MappedFile(path)
    with path.open("r+b") as writer:
        writer.truncate(PIECE)
    mapped_files.start_copying().join()
    assert "stay in the pages of their file" in caplog.text and "became shorter" in caplog.text
    assert torch.equal(file.data[:PIECE], torch.full((PIECE,), ord("a"), dtype=torch.uint8))
    assert mapped_files.uncopied_bytes() == 0


def test_a_discarded_file_is_not_copied(tmp_path, no_other_files):
    (tmp_path / "file").write_bytes(b"a" * 9)
    file = MappedFile(tmp_path / "file")
    file.discard()
    assert mapped_files.start_copying() is None and bytes(file.data.tolist()) == b"a" * 9


def test_a_missing_file_is_an_error(tmp_path, no_other_files):
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "missing")
    assert mapped_files.uncopied_bytes() == 0
