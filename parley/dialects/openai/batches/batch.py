"""A batch: its object, how its requests are read, and the files of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.batch_job import BatchAnswer, BatchEnd, BatchJob, BatchRequest
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.batches.batch_input import InputFault, read_batch_input
from parley.dialects.openai.uploaded_files import save_file
from parley.dialects.openai.vllm_members import PRIORITY_HEADER, SALT_HEADER
from parley.dialects.records import TenantRecords
from parley.dialects.stored_files import content_name, find_content
from parley.dialects.stored_objects import ObjectKind

BATCHES = ObjectKind("batch", "batch_")
BATCHES_PATH = "/v1/batches"
BatchObject = dict[str, Any]
WINDOW_SECONDS = 86_400
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
CUT_OFF = {"code": "server_error", "message": "The answer was cut off."}
SERVER_ENDED = InputFault("server_error", "The server ended before the batch did.")


class BatchResultLine(msgspec.Struct):
    """A line of a file with results."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, str] | None


class OpenAIBatch(BatchJob):
    """A batch that has not ended. ``expiry``: of the files with its results, in seconds."""

    creation_path = BATCHES_PATH
    kept_headers = (PRIORITY_HEADER, SALT_HEADER)

    def __init__(self, records: TenantRecords, batch: BatchObject, expiry: int | None):
        self._records, self._batch, self.result_expiry = records, batch, expiry
        self._unique_id = batch["id"].removeprefix(BATCHES.id_prefix)
        self.record_name = BATCHES.record_name(batch["id"], batch["created_at"])
        self.input_name = content_name(batch["input_file_id"])
        self.deadline = batch["expires_at"]
        self.is_cancelled = batch["status"] == "cancelling"
        self._requests: list[BatchRequest] = []
        self._saved_count = 0  # of answers, as the record has it
        self._faults: list[InputFault] = []
        self.forget_answers()

    def forget_answers(self) -> None:
        """Free the memory of all answers."""
        self._answered: set[int] = set()
        self._succeeded: list[bytes] = []
        self._failed: list[bytes] = []
        self._size = 0  # bytes of both

    def render_accepted(self) -> bytes:
        """Keep the batch, and return it."""
        data = encode_json(self._batch)
        BATCHES.save(self._records, self._batch["id"], self._batch["created_at"], data)
        return data

    def begin(self, now: int) -> Sequence[BatchRequest]:
        """Read the input file, unless that has been done."""
        if not self._requests and not self._faults:
            content = find_content(self._records, self._batch["input_file_id"])
            if content is None:
                self._faults = [InputFault("invalid_input_file", "The input file is not stored any more.")]
            else:
                self._requests, self._faults = read_batch_input(content, self._batch["endpoint"])
        if self._requests and self._batch["in_progress_at"] is None:
            self._store_changes(
                {"status": "in_progress", "in_progress_at": now, "request_counts": self._request_counts()}
            )
            self._batch["in_progress_at"] = now
        return self._requests

    def add_answer(self, number: int, answer: BatchAnswer) -> bool:
        """Add a line to the results."""
        self._answered.add(number)
        has_succeeded = answer.status == 200
        response: dict[str, Any] = {"status_code": answer.status, "request_id": answer.request_id}
        error = None
        try:
            msgspec.json.decode(answer.body, type=msgspec.Raw)
            response["body"] = msgspec.Raw(answer.body)
        except msgspec.MsgspecError:
            has_succeeded, error, response["body"] = False, CUT_OFF, None
        self._add_line(number, answer.custom_id, response, error, has_succeeded=has_succeeded)
        limit = self._records.largest_record
        if self._size > limit:
            message = f"The results are larger than {limit} bytes, and this server stores no more for a batch."
            self._faults = [InputFault("output_too_large", message)]
        return self._size <= limit

    def _add_line(
        self,
        number: int,
        custom_id: str,
        response: dict[str, Any] | None,
        error: dict[str, str] | None,
        *,
        has_succeeded: bool,
    ) -> None:
        line_id = f"batch_req_{self._unique_id}{number:05x}"
        line = encode_json(BatchResultLine(line_id, custom_id, response, error)) + b"\n"
        (self._succeeded if has_succeeded else self._failed).append(line)
        self._size += len(line)

    def save_progress(self) -> None:
        """Record the numbers of answers, if they have changed."""
        if len(self._answered) != self._saved_count:
            self._saved_count = len(self._answered)
            self._store_changes({"request_counts": self._request_counts()})

    def finish(self, end: BatchEnd, now: int) -> None:
        """Keep the files, and record the end."""
        if end == "expired":
            for number, request in enumerate(self._requests):
                if number not in self._answered:
                    self._add_line(number, request.custom_id, None, EXPIRED, has_succeeded=False)
        changes = {
            "request_counts": self._request_counts(),
            "output_file_id": self._save_results("output", self._succeeded, now),
            "error_file_id": self._save_results("error", self._failed, now),
        }
        self._change_end(changes, end, now)

    def has_ended(self) -> bool:
        """Whether the batch has ended, according to its record."""
        data = self._records.find_record(self.record_name)
        return data is not None and msgspec.json.decode(data, type=BatchObject)["status"] not in RUNNING

    def _save_results(self, name: str, lines: list[bytes], now: int) -> str | None:
        """Keep a file with these lines, and return its id; None: there are no lines."""
        if not lines:
            return None
        file_id = f"file-{self._unique_id}-{name}"
        filename = f"{self._batch['id']}_{name}.jsonl"
        content = b"".join(lines)
        save_file(self._records, file_id, content, filename, "batch_output", created=now, expiry=self.result_expiry)
        return file_id

    def _change_end(self, changes: dict[str, Any], end: BatchEnd, now: int) -> None:
        def end_batch(data: bytes) -> bytes:
            batch = msgspec.json.decode(data, type=BatchObject) | changes
            faults = self._faults
            status = "completed" if end == "completed" else "failed"
            if end == "expired":
                status = "expired"
            elif end == "stopped" and batch["status"] == "cancelling":
                status = "cancelled"
            elif end != "completed":
                faults = faults or [SERVER_ENDED]
            if faults:
                status, batch["errors"] = "failed", error_list(faults)
            if status == "completed":
                batch["finalizing_at"] = now
            return encode_json(batch | {"status": status, f"{status}_at": now})

        BATCHES.update(self._records, self._batch["id"], self._batch["created_at"], end_batch)

    def _store_changes(self, changes: dict[str, Any]) -> None:
        """Change members of the batch; one that is being cancelled stays so."""

        def change(data: bytes) -> bytes:
            batch = msgspec.json.decode(data, type=BatchObject)
            stays = batch["status"] == "cancelling"
            return encode_json(batch | changes | ({"status": "cancelling"} if stays else {}))

        BATCHES.update(self._records, self._batch["id"], self._batch["created_at"], change)

    def _request_counts(self) -> dict[str, int]:
        total = len(self._requests) or self._batch["request_counts"]["total"]  # as restored, without an input
        return {"total": total, "completed": len(self._succeeded), "failed": len(self._failed)}


def restore_openai_batch(records: TenantRecords, record_name: str, expiry: int | None) -> OpenAIBatch | None:
    """Return a batch of a server that has ended, None if it has ended itself."""
    data = records.find_record(record_name)
    batch = None if data is None else msgspec.json.decode(data, type=BatchObject)
    return OpenAIBatch(records, batch, expiry) if batch is not None and batch["status"] in RUNNING else None


def error_list(faults: Sequence[InputFault]) -> dict[str, Any]:
    """Return faults as a batch shows them."""
    return {"object": "list", "data": [fault._asdict() for fault in faults]}
