"""Files that are mapped, and moved to memory while they are read."""

import ctypes
import errno
import threading

import pytest
import torch

from parley.native import mapped_weights
from parley.native.mapped_weights import PIECE, MappedWeightFile


@pytest.fixture
def no_other_files(monkeypatch):
    monkeypatch.setattr(mapped_weights, "_waiting", [])


@pytest.mark.parametrize("size", [0, 1, 4097, PIECE, 2 * PIECE + 12345])
def test_data_stay_the_same_while_they_are_moved_to_memory(tmp_path, no_other_files, size):
    expected = torch.randint(0, 256, (size,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(expected.numpy().tobytes())
    file = MappedWeightFile(tmp_path / "file")
    address = file.data.data_ptr()
    assert mapped_weights.uncopied_bytes() == size and torch.equal(file.data, expected)

    ended, results = threading.Event(), []

    def read_repeatedly():
        while not ended.is_set():
            results.append(torch.equal(file.data, expected))

    reader = threading.Thread(target=read_repeatedly)
    reader.start()
    mapped_weights.start_copying().join()
    ended.set()
    reader.join()
    assert all(results) and torch.equal(file.data, expected) and file.data.data_ptr() == address
    assert mapped_weights.uncopied_bytes() == 0 and mapped_weights.start_copying() is None


def test_data_no_longer_come_from_the_file_once_they_are_copied(tmp_path, no_other_files):
    path = tmp_path / "file"
    path.write_bytes(b"a" * (PIECE + 9))
    file = MappedWeightFile(path)
    mapped_weights.start_copying().join()
    with path.open("r+b") as writer:
        writer.write(b"b" * (PIECE + 9))
    assert torch.equal(file.data, torch.full((PIECE + 9,), ord("a"), dtype=torch.uint8))


def test_what_cannot_be_copied_stays_mapped(tmp_path, no_other_files, caplog):
    path = tmp_path / "file"
    path.write_bytes(b"a" * (2 * PIECE))
    file = MappedWeightFile(path)
    with path.open("r+b") as writer:
        writer.truncate(PIECE)
    mapped_weights.start_copying().join()
    assert "stay in the pages of their file" in caplog.text and "became shorter" in caplog.text
    assert torch.equal(file.data[:PIECE], torch.full((PIECE,), ord("a"), dtype=torch.uint8))
    assert mapped_weights.uncopied_bytes() == 0


def test_a_piece_that_the_system_removed_before_it_failed_comes_from_the_file_again(
    tmp_path, no_other_files, monkeypatch, caplog
):
    expected = torch.randint(0, 256, (2 * PIECE,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(expected.numpy().tobytes())
    file = MappedWeightFile(tmp_path / "file")
    libc = mapped_weights._libc()
    moves = []

    def move_one_piece(source, old_size, new_size, flags, target):
        moves.append(target)
        if len(moves) == 1:
            return move(source, old_size, new_size, flags, target)
        libc.munmap(target, new_size)
        ctypes.set_errno(errno.ENOMEM)
        return mapped_weights.FAILED

    move, libc.mremap = libc.mremap, move_one_piece
    monkeypatch.setattr(mapped_weights, "_libc", lambda: libc)
    mapped_weights.start_copying().join()
    assert len(moves) == 2 and torch.equal(file.data, expected)
    assert "stay in the pages of their file" in caplog.text


def test_pages_that_the_file_does_not_have_are_an_error(tmp_path, no_other_files):
    path = tmp_path / "file"
    path.write_bytes(b"a" * PIECE)
    file = MappedWeightFile(path)
    file.load_pages(file.data)
    with path.open("r+b") as writer:
        writer.truncate(PIECE // 2)
    file.load_pages(file.data[: PIECE // 2])
    with pytest.raises(OSError, match="cannot be read"):
        file.load_pages(file.data)


def test_a_discarded_file_is_not_copied(tmp_path, no_other_files):
    (tmp_path / "file").write_bytes(b"a" * 9)
    file = MappedWeightFile(tmp_path / "file")
    file.discard()
    assert mapped_weights.start_copying() is None and bytes(file.data.tolist()) == b"a" * 9


def test_a_missing_file_is_an_error(tmp_path, no_other_files):
    with pytest.raises(FileNotFoundError):
        MappedWeightFile(tmp_path / "missing")
    assert mapped_weights.uncopied_bytes() == 0
