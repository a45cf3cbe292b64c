"""Inference tables: requests to endpoints and their answers, as rows in files.

A thread writes each row as soon as its request has ended: a file of JSON lines for each table and day (UTC). Requests
never wait for it. The memory for bodies, of running requests and of rows that wait, is bounded: bodies beyond the bound
are left out of their rows, and rows beyond it are lost, which the log says. Knows no API.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.facts import EndpointTable
from parley.serving.file_faults import describe_fault

log = logging.getLogger("parley.server")

MAX_PAYLOAD = 1 << 20  # bytes of a request or an answer in a row
MAX_HELD = 128 << 20  # bytes of all bodies that are not written yet
MAX_WAITING_ROWS = 10_000
WARNING_SECONDS = 60.0  # between two warnings about lost rows
REQUEST_TOO_LARGE, RESPONSE_TOO_LARGE = "MAX_REQUEST_SIZE_EXCEEDED", "MAX_RESPONSE_SIZE_EXCEEDED"
BUFFER_FULL = "LOGGING_BUFFER_FULL"


class PayloadMemory:
    """Counts the bytes that rows hold, also for other threads."""

    def __init__(self, limit: int = MAX_HELD):
        self._limit = limit
        self._lock = threading.Lock()
        self.held = 0

    def reserve_bytes(self, size: int) -> bool:
        """Count bytes, if they fit."""
        with self._lock:
            if self.held + size > self._limit:
                return False
            self.held += size
            return True

    def give_back(self, size: int) -> None:
        """Count bytes no longer."""
        with self._lock:
            self.held -= size


class Payload:
    """One body of a row. ``pieces`` is None once it is too large; ``codes`` says why."""

    def __init__(self, memory: PayloadMemory, too_large: str):
        self._memory, self._too_large = memory, too_large
        self.pieces: list[bytes] | None = []
        self.size = 0
        self.codes: list[str] = []

    def add_piece(self, data: bytes) -> None:
        """Add a piece."""
        if self.pieces is None:
            return
        if self.size + len(data) > MAX_PAYLOAD:
            self._drop(self._too_large)
        elif not self._memory.reserve_bytes(len(data)):
            self._drop(BUFFER_FULL)
        else:
            self.pieces.append(data)
            self.size += len(data)

    def text(self) -> str | None:
        """Return the body as text; None if it was too large."""
        return None if self.pieces is None else b"".join(self.pieces).decode("utf-8", "replace")

    def release(self) -> None:
        """Give its memory back."""
        self._memory.give_back(self.size)
        self.size = 0

    def _drop(self, code: str) -> None:
        self.release()
        self.pieces = None
        self.codes.append(code)


@dataclass
class TableRow:
    """A row while its request runs, and until it is written. The last members are known when the request has ended."""

    tables: InferenceTables
    table: EndpointTable
    request_id: str  # a UUID
    served_entity: str
    requester: str
    request: Payload
    response: Payload
    received_at: float = field(default_factory=time.time)
    status: int = 0
    seconds: float = 0.0

    def add_piece(self, data: bytes) -> None:
        """Add a piece of the answer."""
        self.response.add_piece(data)

    def finish(self, status: int, seconds: float) -> None:
        """Have the row written. ``status``: 0 if the client left before an answer."""
        self.status, self.seconds = status, seconds
        self.tables.put_row(self)


class InferenceTables:
    """The tables in one folder. Rows are written in a thread of their own, which starts with the first row."""

    def __init__(self, folder: Path, memory: PayloadMemory | None = None):
        self._folder = folder
        self._memory = memory or PayloadMemory()
        self._rows: queue.Queue[TableRow | None] = queue.Queue(MAX_WAITING_ROWS)
        self._writer: threading.Thread | None = None
        self._lost = 0  # rows since the last warning
        self._warned_at = -WARNING_SECONDS

    def begin_row(
        self, table: EndpointTable, request_id: str, served_entity: str, requester: str, body: bytes
    ) -> TableRow:
        """Return a row for a request that begins."""
        request = Payload(self._memory, REQUEST_TOO_LARGE)
        request.add_piece(body)
        response = Payload(self._memory, RESPONSE_TOO_LARGE)
        return TableRow(self, table, request_id, served_entity, requester, request, response)

    def put_row(self, row: TableRow) -> None:
        """Have a row written, or lose it if too many wait."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_rows, name="parley-inference-tables", daemon=True)
            self._writer.start()
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._release(row)
            self._warn_of_loss("too many wait to be written.")

    def close(self, timeout: float = 5.0) -> None:
        """Write the rows that wait, for at most ``timeout`` seconds."""
        if self._writer is None:
            return
        end = time.monotonic() + timeout
        with suppress(queue.Full):  # a disk that hangs; the rows that wait are lost
            self._rows.put(None, timeout=timeout)
        self._writer.join(max(0.0, end - time.monotonic()))

    def _write_rows(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._append_row(row)
            except OSError as error:
                file = self._table_file(row)
                self._warn_of_loss(f"{file} cannot be written: {describe_fault(file, error)}")
            finally:
                self._release(row)

    def _append_row(self, row: TableRow) -> None:
        path = self._table_file(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(_row_object(row), ensure_ascii=False).encode() + b"\n"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # the end of a row that a killed server did not finish
                line = b"\n" + line
            while line:
                line = line[os.write(file, line) :]
        finally:
            os.close(file)

    def _table_file(self, row: TableRow) -> Path:
        return self._folder / row.table.folder_name / f"{_received_time(row):%Y-%m-%d}.jsonl"

    def _release(self, row: TableRow) -> None:
        row.request.release()
        row.response.release()

    def _warn_of_loss(self, reason: str) -> None:
        self._lost += 1
        if time.monotonic() - self._warned_at > WARNING_SECONDS:
            log.warning("%d rows of inference tables were lost: %s", self._lost, reason)
            self._lost, self._warned_at = 0, time.monotonic()


def _received_time(row: TableRow) -> datetime:
    return datetime.fromtimestamp(row.received_at, UTC)


def _row_object(row: TableRow) -> dict[str, Any]:
    """Return a row with the columns of Databricks' inference tables."""
    received = _received_time(row)
    request, response = row.request.text(), row.response.text()
    return {
        "databricks_request_id": row.request_id,
        "client_request_id": _client_request_id(request),
        "request_date": f"{received:%Y-%m-%d}",
        "request_time": received.isoformat(timespec="milliseconds"),
        "status_code": row.status,
        "sampling_fraction": 1.0,
        "execution_duration_ms": round(row.seconds * 1000),
        "request": request,
        "response": response,
        "served_entity_id": row.served_entity,
        "logging_error_codes": row.request.codes + row.response.codes,
        "requester": row.requester or None,
    }


def _client_request_id(request: str | None) -> str | None:
    """Return the id that the client gave its request in the body."""
    if request is None or '"client_request_id"' not in request:
        return None
    try:
        value = msgspec.json.decode(request, type=dict[str, Any]).get("client_request_id")
    except (msgspec.MsgspecError, RecursionError):
        return None
    return value if isinstance(value, str) else None
