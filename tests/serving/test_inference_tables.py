"""Inference tables: rows in files, bodies that are too large, bounded memory, what a killed server leaves behind."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from parley.dialects.facts import EndpointTable
from parley.serving.endpoints import inference_tables
from parley.serving.endpoints.inference_tables import MAX_PAYLOAD, InferenceTables, PayloadMemory

TABLE = EndpointTable("main", "logs", "e")
REQUEST_ID = "0f0f0f0f-0000-0000-0000-000000000000"


def record(
    tables: InferenceTables, request: bytes = b"{}", pieces: tuple[bytes, ...] = (b"a", b"b"), at: float = 0.0
) -> None:
    row = tables.begin_row(TABLE, REQUEST_ID, "m", "ann", request)
    row.received_at = at
    for piece in pieces:
        row.add_piece(piece)
    row.finish(200, 0.25)


def read_rows(folder: Path, day: str = "1970-01-01") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "main.logs.e_payload" / f"{day}.jsonl").read_text().splitlines()]


def test_row_has_the_columns_of_an_inference_table(tmp_path):
    tables = InferenceTables(tmp_path)
    record(tables, '{"client_request_id":"mine","x":"é"}'.encode(), at=1.5)
    tables.close()
    assert read_rows(tmp_path) == [
        {
            "databricks_request_id": REQUEST_ID,
            "client_request_id": "mine",
            "request_date": "1970-01-01",
            "request_time": "1970-01-01T00:00:01.500+00:00",
            "status_code": 200,
            "sampling_fraction": 1.0,
            "execution_duration_ms": 250,
            "request": '{"client_request_id":"mine","x":"é"}',
            "response": "ab",
            "served_entity_id": "m",
            "logging_error_codes": [],
            "requester": "ann",
        }
    ]


def test_each_day_has_a_file_and_rows_are_there_before_the_server_ends(tmp_path):
    tables = InferenceTables(tmp_path)
    record(tables)
    record(tables, at=86400.0)
    deadline = time.monotonic() + 20
    while not (tmp_path / "main.logs.e_payload" / "1970-01-02.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    tables.close()
    assert len(read_rows(tmp_path)) == len(read_rows(tmp_path, "1970-01-02")) == 1


def test_bodies_that_are_too_large_are_left_out_with_a_code(tmp_path):
    memory = PayloadMemory()
    tables = InferenceTables(tmp_path, memory)
    record(tables, b"x" * MAX_PAYLOAD, (b"y" * MAX_PAYLOAD, b"z"))
    record(tables, b"x" * (MAX_PAYLOAD + 1), (b"y",))
    tables.close()
    first, second = read_rows(tmp_path)
    assert len(first["request"]) == MAX_PAYLOAD and first["response"] is None
    assert first["logging_error_codes"] == ["MAX_RESPONSE_SIZE_EXCEEDED"]
    assert (second["request"], second["response"]) == (None, "y")
    assert second["logging_error_codes"] == ["MAX_REQUEST_SIZE_EXCEEDED"]
    assert memory.held == 0


def test_bodies_beyond_the_memory_of_all_rows_are_left_out(tmp_path):
    memory = PayloadMemory(limit=10)
    tables = InferenceTables(tmp_path, memory)
    waiting = tables.begin_row(TABLE, REQUEST_ID, "m", "", b"123456")
    waiting.received_at = 0.0
    record(tables, b"12345", (b"1234",))
    assert memory.held >= 6
    waiting.finish(0, 0.0)
    tables.close()
    first, second = read_rows(tmp_path)
    assert (first["request"], first["response"]) == (None, "1234")
    assert first["logging_error_codes"] == [inference_tables.BUFFER_FULL]
    assert second["request"] == "123456" and second["requester"] is None and second["status_code"] == 0
    assert memory.held == 0


def test_a_row_that_a_killed_server_did_not_finish_stays_alone(tmp_path):
    file = tmp_path / "main.logs.e_payload" / "1970-01-01.jsonl"
    file.parent.mkdir()
    file.write_text('{"whole": 1}\n{"half')
    tables = InferenceTables(tmp_path)
    record(tables)
    tables.close()
    whole, half, new = file.read_text().splitlines()
    assert (whole, half) == ('{"whole": 1}', '{"half') and json.loads(new)["response"] == "ab"


def test_rows_that_cannot_be_written_are_lost_with_a_warning(tmp_path, caplog):
    (tmp_path / "main.logs.e_payload").write_text("not a folder")
    memory = PayloadMemory()
    tables = InferenceTables(tmp_path, memory)
    with caplog.at_level(logging.WARNING, "parley.server"):
        record(tables)
        record(tables)
        tables.close()
    (message,) = caplog.messages
    assert "1 rows of inference tables were lost" in message and memory.held == 0
    assert f"{tmp_path}/main.logs.e_payload/" in message and message.endswith(".jsonl cannot be written: File exists.")


def test_rows_beyond_the_queue_are_lost_and_never_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_tables, "MAX_WAITING_ROWS", 2)
    memory = PayloadMemory()
    tables = InferenceTables(tmp_path, memory)
    monkeypatch.setattr(tables, "_write_rows", lambda: None)  # a writer that does nothing
    for _ in range(5):
        record(tables)
    assert tables._rows.qsize() == 2 and memory.held == 2 * len(b"{}ab")


def test_a_disk_that_hangs_does_not_keep_the_server_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_tables, "MAX_WAITING_ROWS", 1)
    tables, disk_answers = InferenceTables(tmp_path), threading.Event()
    monkeypatch.setattr(tables, "_append_row", lambda row: disk_answers.wait(20))
    for _ in range(3):
        record(tables)
    closing = threading.Thread(target=tables.close, args=(0.05,))
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    disk_answers.set()


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_table_folder_never_leaves_the_operators_folder(name):
    from parley.dialects.databricks.limits import TABLE_PART

    assert not TABLE_PART.fullmatch(name)
