"""Batches of messages: their routes, how their requests are read, and their results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec

from parley.dialects.anthropic.api_headers import VERSION_HEADER
from parley.dialects.anthropic.models import MAX_PAGE, read_page_limit
from parley.dialects.anthropic.refusal_wording import ANTHROPIC_WORDING
from parley.dialects.batch_job import BatchAnswer, BatchEnd, BatchJob, BatchRequest, has_lost_server, waits_for_server
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.records import TenantRecords
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import QuerySchemas, Route
from parley.dialects.stored_files import content_name, delete_content, find_content, save_content
from parley.dialects.stored_objects import ObjectKind
from parley.errors import BadRequest, TooLarge, UnknownRecord, Unsupported, excerpt

BATCHES = ObjectKind("message-batch", "msgbatch_")
BATCHES_PATH = "/v1/messages/batches"
MESSAGES_PATH = "/v1/messages"
MAX_REQUESTS = 100_000
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
WINDOW_SECONDS = 86_400
RESULTS_TYPE = b"application/x-jsonl"
RESULTS_SUFFIX = "-results"
SERVER_ENDED = {"type": "api_error", "message": "The server ended before this request was answered."}
NO_ROOM = {"type": "api_error", "message": "The results of the batch are larger than this server stores."}
CUT_OFF = {"type": "api_error", "message": "The answer was cut off."}
ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 256}
PAGE_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "after_id": ID_SCHEMA,
    "before_id": ID_SCHEMA,
}


class StoredBatch(msgspec.Struct):
    """A record: a batch as clients get it, and its time in seconds since the epoch."""

    batch: dict[str, Any]
    created: int

    @property
    def record_name(self) -> str:
        """The name of the record."""
        return BATCHES.record_name(self.batch["id"], self.created)

    @property
    def deadline(self) -> int:
        """When the batch expires, in seconds since the epoch."""
        return self.created + WINDOW_SECONDS


class StoredMessageRequest(msgspec.Struct):
    """A request of a batch, as it is stored until the batch runs."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchResult(msgspec.Struct):
    """A result."""

    custom_id: str
    result: dict[str, Any]


class MessageBatch(BatchJob):
    """A batch that has not ended. ``lines``: its requests, each an ``StoredMessageRequest``, if it was just created."""

    creation_path = BATCHES_PATH
    kept_headers = (VERSION_HEADER, b"anthropic-beta")

    def __init__(self, records: TenantRecords, stored: StoredBatch, lines: bytes = b""):
        self._records, self._stored, self._lines = records, stored, lines
        self._id: str = stored.batch["id"]
        self.record_name, self.input_name = stored.record_name, content_name(self._id)
        self.deadline = stored.deadline
        self.is_cancelled = stored.batch["processing_status"] == "canceling"
        self._requests: list[BatchRequest] = []
        self._saved_count = 0
        self.forget_answers()

    def forget_answers(self) -> None:
        """Free the memory of all results."""
        counts: dict[str, int] = self._stored.batch["request_counts"]
        self._counts = dict.fromkeys(counts, 0) | {"processing": sum(counts.values())}
        self._results: dict[int, bytes] = {}
        self._size = 0
        self._has_room = True

    def render_accepted(self) -> bytes:
        """Keep the batch and its requests, and return it."""
        save_content(self._records, self._id, self._lines)
        self._lines = b""
        BATCHES.save(self._records, self._id, self._stored.created, encode_json(self._stored))
        return encode_json(self._stored.batch)

    def begin(self, now: int) -> Sequence[BatchRequest]:
        """Read the requests, unless that has been done."""
        if not self._requests:
            content = find_content(self._records, self._id) or b""  # the store may have dropped it
            lines = [msgspec.json.decode(line, type=StoredMessageRequest) for line in content.splitlines()]
            self._requests = [BatchRequest(MESSAGES_PATH, bytes(line.params), line.custom_id) for line in lines]
        return self._requests

    def add_answer(self, number: int, answer: BatchAnswer) -> bool:
        """Add a result."""
        try:
            msgspec.json.decode(answer.body, type=msgspec.Raw)
        except msgspec.MsgspecError:
            self._add_result(number, answer.custom_id, "errored", error=_error_object(CUT_OFF))
        else:
            if answer.status == 200:
                self._add_result(number, answer.custom_id, "succeeded", message=msgspec.Raw(answer.body))
            else:
                self._add_result(number, answer.custom_id, "errored", error=msgspec.Raw(answer.body))
        self._has_room = self._size <= self._records.largest_record
        return self._has_room

    def _add_result(self, number: int, custom_id: str, kind: str, **members: Any) -> None:
        line = encode_json(MessageBatchResult(custom_id, {"type": kind, **members})) + b"\n"
        self._results[number] = line
        self._size += len(line)
        self._counts[kind] += 1
        self._counts["processing"] -= 1

    def save_progress(self) -> None:
        """Record the numbers of results, if they have changed."""
        if len(self._results) != self._saved_count:
            self._saved_count = len(self._results)
            self._store_changes({"request_counts": self._counts})

    def finish(self, end: BatchEnd, now: int) -> None:
        """Keep the results, and record the end."""
        is_cancelled = self._find_status() == "canceling"
        for number, request in enumerate(self.begin(now)):  # the batch may have ended while this call waited
            if number not in self._results:
                self._add_unanswered(number, request.custom_id, end, is_cancelled=is_cancelled)
        results_url = None
        if self._results:
            content = b"".join(line for _, line in sorted(self._results.items()))
            save_content(self._records, self._id + RESULTS_SUFFIX, content)
            results_url = f"{BATCHES_PATH}/{self._id}/results"
        # Requests that are no longer stored
        self._counts |= {"errored": self._counts["errored"] + self._counts["processing"], "processing": 0}
        delete_content(self._records, self._id)
        ended = {"processing_status": "ended", "ended_at": iso_time(now), "results_url": results_url}
        self._store_changes({"request_counts": self._counts, **ended})

    def has_ended(self) -> bool:
        """Whether the batch has ended, according to its record."""
        return self._find_status() == "ended"

    def _find_status(self) -> str:
        """Return the status as the record has it, "" if there is no record."""
        data = BATCHES.find(self._records, self._id)
        batch: dict[str, Any] = {} if data is None else msgspec.json.decode(data, type=StoredBatch).batch
        return str(batch.get("processing_status", ""))

    def _add_unanswered(self, number: int, custom_id: str, end: BatchEnd, *, is_cancelled: bool) -> None:
        if end == "expired":
            self._add_result(number, custom_id, "expired")
        elif is_cancelled:
            self._add_result(number, custom_id, "canceled")
        else:
            error = _error_object(SERVER_ENDED if self._has_room else NO_ROOM)
            self._add_result(number, custom_id, "errored", error=error)

    def _store_changes(self, changes: dict[str, Any]) -> None:
        def change(data: bytes) -> bytes:
            stored = msgspec.json.decode(data, type=StoredBatch)
            stored.batch |= changes
            return encode_json(stored)

        BATCHES.update(self._records, self._id, self._stored.created, change)


def _error_object(error: dict[str, str]) -> dict[str, Any]:
    return {"type": "error", "error": error, "request_id": None}


def restore_message_batch(records: TenantRecords, record_name: str, expiry: int | None) -> MessageBatch | None:
    """Return the batch of a server that has ended; None if the batch has ended, too, or has no record."""
    data = records.find_record(record_name)
    stored = None if data is None else msgspec.json.decode(data, type=StoredBatch)
    is_running = stored is not None and stored.batch["processing_status"] != "ended"
    return MessageBatch(records, stored) if stored is not None and is_running else None


def iso_time(seconds: int) -> str:
    """Return a time in the form of RFC 3339. ``seconds``: since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- the routes


def create_message_batch(body: bytes, context: RequestContext) -> MessageBatch:
    """Create a batch. Raises BadRequest, TooLarge."""
    fields = decode_fields(body, ANTHROPIC_WORDING)
    if not context.records.are_kept:
        raise Unsupported("This server runs no message batches, because it stores nothing.")
    lines = _read_requests(fields)
    content, limit = b"".join(lines), context.records.largest_record
    if len(content) > limit:
        size = len(content)
        raise TooLarge(f"The requests have {size} bytes; this server stores {limit} at most.", size=size, limit=limit)
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    batch = {
        "id": f"msgbatch_{context.unique_id}",
        "type": "message_batch",
        "processing_status": "in_progress",
        "request_counts": counts | {"processing": len(lines)},
        "ended_at": None,
        "created_at": iso_time(context.created),
        "expires_at": iso_time(context.created + WINDOW_SECONDS),
        "archived_at": None,
        "cancel_initiated_at": None,
        "results_url": None,
    }
    return MessageBatch(context.records, StoredBatch(batch, context.created), content)


def _read_requests(fields: Fields) -> list[bytes]:
    """Return the requests as lines. Raises BadRequest."""
    lines: dict[str, bytes] = {}
    for request in fields.objects("requests", cap=MAX_REQUESTS):
        for name in ("custom_id", "params"):
            if not request.has_value(name):
                raise request.missing_member(name)
        custom_id = request.string("custom_id", "")
        if not CUSTOM_ID.fullmatch(custom_id):
            sentence = f"should be 1 to 64 letters, digits, hyphens and underscores, but got {excerpt(custom_id)}"
            raise request.member_error("custom_id", sentence)
        if custom_id in lines:
            raise request.member_error("custom_id", f"{excerpt(custom_id)} is that of an earlier request")
        params = request.object("params")
        assert params is not None
        if params.boolean("stream", False):
            raise params.member_error("stream", "a request of a batch cannot be a stream")
        lines[custom_id] = encode_json({"custom_id": custom_id, "params": request.raw_value("params")}) + b"\n"
    if not lines:
        raise (
            fields.empty_member("requests", "array")
            if fields.has_value("requests")
            else fields.missing_member("requests")
        )
    return list(lines.values())


def answer_message_batch(body: bytes, context: RequestContext) -> Answer:
    """Return a batch. Raises UnknownRecord."""
    return json_answer(_load_batch(context).batch)


def answer_batch_results(body: bytes, context: RequestContext) -> Answer:
    """Return the results of a batch that has ended. Raises UnknownRecord, BadRequest."""
    stored = _load_batch(context)
    if stored.batch["processing_status"] != "ended":
        raise BadRequest(f"The batch {excerpt(stored.batch['id'])} has not ended, so it has no results yet.")
    content = find_content(context.records, stored.batch["id"] + RESULTS_SUFFIX)
    if content is None:
        raise UnknownRecord(f"The results of the batch {excerpt(stored.batch['id'])} are not stored.")
    return Answer(200, content, RESULTS_TYPE)


def cancel_message_batch(body: bytes, context: RequestContext) -> Answer:
    """Stop a batch. Raises UnknownRecord, BadRequest."""
    stored = _load_batch(context)
    if stored.batch["processing_status"] != "in_progress":
        return json_answer(stored.batch)
    is_left = waits_for_server(context.records, stored.record_name)  # the server that resumes the batch will end it

    def change(data: bytes) -> bytes:
        nonlocal stored
        stored = msgspec.json.decode(data, type=StoredBatch)
        if stored.batch["processing_status"] == "ended":  # meanwhile
            return data
        # While the record is held, the stopped batch cannot record its end: it would not see that it was canceled
        if not context.records.stop_run(stored.record_name) and not is_left:
            raise BadRequest("A batch that runs on another server cannot be canceled here.")
        stored.batch |= {"processing_status": "canceling", "cancel_initiated_at": iso_time(context.created)}
        return encode_json(stored)

    BATCHES.update(context.records, stored.batch["id"], stored.created, change)
    return json_answer(stored.batch)


def delete_batch(body: bytes, context: RequestContext) -> Answer:
    """Delete a batch that has ended. Raises UnknownRecord, BadRequest."""
    stored = _load_batch(context)
    batch_id = stored.batch["id"]
    if stored.batch["processing_status"] != "ended":
        raise BadRequest(f"The batch {excerpt(batch_id)} has not ended. Cancel it before deleting it.")
    delete_content(context.records, batch_id)  # kept if the server ended while the batch ran
    delete_content(context.records, batch_id + RESULTS_SUFFIX)
    context.records.delete_record(stored.record_name)
    return json_answer({"id": batch_id, "type": "message_batch_deleted"})


def list_message_batches(body: bytes, context: RequestContext) -> Answer:
    """Return a page of batches, the newest first, as ``limit``, ``after_id`` and ``before_id`` ask. Raises
    InvalidValue."""
    query = {name: values[-1] for name, values in parse_qs(context.query_string.decode("latin-1")).items()}
    limit = read_page_limit(query.get("limit"))
    goes_back = "after_id" not in query and "before_id" in query
    name = "before_id" if goes_back else "after_id"
    after = None
    if (batch_id := query.get(name)) is not None:
        data = BATCHES.find(context.records, batch_id)
        if data is None:
            raise ANTHROPIC_WORDING.invalid_error(name, f"there is no batch {excerpt(batch_id)}")
        after = msgspec.json.decode(data, type=StoredBatch).record_name
    page, has_more = BATCHES.list_page(
        context.records,
        lambda data: _settled_batch(context, data).batch,
        limit=limit,
        after=after,
        newest_first=not goes_back,
    )
    batches = page[::-1] if goes_back else page
    return json_answer(
        {
            "data": batches,
            "has_more": has_more,
            "first_id": batches[0]["id"] if batches else None,
            "last_id": batches[-1]["id"] if batches else None,
        }
    )


def _load_batch(context: RequestContext) -> StoredBatch:
    data = BATCHES.find(context.records, context.path_parts["id"])
    if data is None:
        raise UnknownRecord(f"There is no message batch {excerpt(context.path_parts['id'])}.")
    return _settled_batch(context, data)


def _settled_batch(context: RequestContext, data: bytes) -> StoredBatch:
    """Return a batch. If its server ended while it ran, and no other server runs it, end it with errors first."""
    stored = msgspec.json.decode(data, type=StoredBatch)
    is_running = stored.batch["processing_status"] != "ended"
    if is_running and has_lost_server(context.records, stored.record_name, stored.deadline, context.created):
        counts = stored.batch["request_counts"]
        counts |= {"errored": sum(counts.values()), "processing": 0, "succeeded": 0}
        stored.batch |= {"processing_status": "ended", "ended_at": iso_time(context.created)}
        BATCHES.save(context.records, stored.batch["id"], stored.created, encode_json(stored))
    return stored


ROUTES = (
    Route("POST", BATCHES_PATH, "stored", reader=create_message_batch, batch_restorer=restore_message_batch),
    Route("GET", BATCHES_PATH, "stored", reader=list_message_batches, reads_many=True, query=PAGE_QUERY),
    Route("GET", BATCHES_PATH + "/{id}", "stored", reader=answer_message_batch),
    Route("DELETE", BATCHES_PATH + "/{id}", "stored", reader=delete_batch),
    Route("POST", BATCHES_PATH + "/{id}/cancel", "stored", reader=cancel_message_batch),
    Route(
        "GET",
        BATCHES_PATH + "/{id}/results",
        "stored",
        reader=answer_batch_results,
        content_types=(RESULTS_TYPE.decode(),),
    ),
)
