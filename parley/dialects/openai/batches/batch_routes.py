"""The routes of batches: create, read, list and cancel."""

from __future__ import annotations

import msgspec

from parley.dialects.batch_job import has_lost_server, waits_for_server
from parley.dialects.fields import decode_fields
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.openai import object_lists
from parley.dialects.openai.batches.batch import (
    BATCHES,
    BATCHES_PATH,
    RUNNING,
    SERVER_ENDED,
    WINDOW_SECONDS,
    BatchObject,
    OpenAIBatch,
    error_list,
)
from parley.dialects.openai.batches.batch_input import ENDPOINTS
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.openai.uploaded_files import find_uploaded_file, read_expiry
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest, InvalidValue, ObjectConflict, UnknownRecord, Unsupported, excerpt

__all__ = ["BATCHES_PATH", "answer_openai_batch", "cancel_openai_batch", "create_openai_batch", "list_openai_batches"]

WINDOWS = ("24h",)
INPUT_PURPOSE = "batch"
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def create_openai_batch(body: bytes, context: RequestContext) -> OpenAIBatch:
    """Create a batch. Raises BadRequest."""
    fields = decode_fields(body)
    if not context.records.are_kept:
        raise Unsupported("This server runs no batches, because it stores nothing.")
    for name in ("input_file_id", "endpoint", "completion_window"):
        if not fields.has_value(name):
            raise fields.missing_member(name)
    file_id = fields.string("input_file_id", "", cap=object_lists.MAX_ID)
    endpoint = fields.string("endpoint", "", allowed=ENDPOINTS)
    window = fields.string("completion_window", "", allowed=WINDOWS)
    expiry = read_expiry(fields, "output_expires_after")
    metadata = read_metadata(fields)
    file = find_uploaded_file(context.records, file_id, context.created)
    if file is None:
        raise InvalidValue(f"Invalid 'input_file_id': there is no file {excerpt(file_id)}.", field="input_file_id")
    if file["purpose"] != INPUT_PURPOSE:
        sentence = f"the purpose of the file must be '{INPUT_PURPOSE}', but is '{file['purpose']}'"
        raise InvalidValue(f"Invalid 'input_file_id': {sentence}.", field="input_file_id")
    batch: BatchObject = {
        "id": f"batch_{context.unique_id}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": context.created,
        "expires_at": context.created + WINDOW_SECONDS,
        **{f"{time}_at": None for time in TIMES},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata or None,
    }
    return OpenAIBatch(context.records, batch, expiry)


def answer_openai_batch(body: bytes, context: RequestContext) -> Answer:
    """Return a batch. Raises UnknownRecord."""
    return json_answer(_load_batch(context))


def cancel_openai_batch(body: bytes, context: RequestContext) -> Answer:
    """Stop a batch. Raises UnknownRecord, ObjectConflict, BadRequest."""
    batch = _load_batch(context)
    if batch["status"] == "cancelling":
        return json_answer(batch)
    _check_running(batch)
    name = BATCHES.record_name(batch["id"], batch["created_at"])
    is_left = waits_for_server(context.records, name)  # the server that resumes the batch will end it

    def change(data: bytes) -> bytes:
        nonlocal batch
        batch = msgspec.json.decode(data, type=BatchObject)
        _check_running(batch)  # it may have ended meanwhile
        # While the record is held, the stopped batch cannot record its end: it would not see that it was cancelled
        if not context.records.stop_run(name) and not is_left:
            raise BadRequest("Cannot cancel a batch that runs on another server.")
        batch |= {"status": "cancelling", "cancelling_at": context.created}
        return encode_json(batch)

    BATCHES.update(context.records, batch["id"], batch["created_at"], change)
    return json_answer(batch)


def _check_running(batch: BatchObject) -> None:
    if batch["status"] not in RUNNING:
        raise ObjectConflict(f"Cannot cancel a batch with status '{batch['status']}'.")


def list_openai_batches(body: bytes, context: RequestContext) -> Answer:
    """List batches, the newest first. Raises BadRequest."""
    list_query = object_lists.read_list_query(object_lists.read_query(context))
    after = None
    if list_query.after is not None:
        data = BATCHES.find(context.records, list_query.after)
        if data is None:
            raise InvalidValue(f"Invalid 'after': there is no batch {excerpt(list_query.after)}.", field="after")
        before = msgspec.json.decode(data, type=BatchObject)
        after = BATCHES.record_name(before["id"], before["created_at"])
    page, has_more = BATCHES.list_page(
        context.records, lambda data: _settled_batch(context, data), limit=list_query.limit, after=after
    )
    return json_answer(object_lists.list_object(page, has_more=has_more))


def _load_batch(context: RequestContext) -> BatchObject:
    data = BATCHES.find(context.records, context.path_parts["id"])
    if data is None:
        raise UnknownRecord(f"No batch found with id {excerpt(context.path_parts['id'])}.")
    return _settled_batch(context, data)


def _settled_batch(context: RequestContext, data: bytes) -> BatchObject:
    """Return a batch; one whose server has ended while it ran, and that no other runs, has failed."""
    batch = msgspec.json.decode(data, type=BatchObject)
    name = BATCHES.record_name(batch["id"], batch["created_at"])
    is_running = batch["status"] in RUNNING
    if is_running and has_lost_server(context.records, name, batch["expires_at"], context.created):
        batch |= {"status": "failed", "failed_at": context.created, "errors": error_list([SERVER_ENDED])}
        BATCHES.save(context.records, batch["id"], batch["created_at"], encode_json(batch))
    return batch
