"""Files that clients upload: the input of batches, and those that parts of later messages name by ``file_id``.

They are uploaded, listed, read and deleted at ``/v1/files``.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.file_types import guess_media_type
from parley.dialects.form_data import UploadedFile, decode_form
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.openai import object_lists
from parley.dialects.records import TenantRecords
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.stored_files import delete_content, find_content, read_named_file, save_content
from parley.dialects.stored_objects import ObjectKind
from parley.errors import InvalidValue, TooLarge, UnknownRecord, Unsupported, excerpt

FILES = ObjectKind("file", "file-")
FileObject = dict[str, Any]
PURPOSES = ("batch", "user_data", "vision", "assistants")
MAX_LISTED = 10_000  # files in an answer
MAX_FILENAME = 512  # characters
EXPIRY_ANCHOR = "created_at"
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86_400  # seconds
CONTENT_TYPE = b"application/octet-stream"


def upload_openai_file(body: bytes, context: RequestContext) -> Answer:
    """Keep a file. Raises BadRequest, TooLarge."""
    form = decode_form(body, context.headers.get(b"content-type", b""), ("file",))
    if not context.records.are_kept:
        raise Unsupported("This server stores no files.")
    if not form.has_value("purpose"):
        raise form.missing_member("purpose")
    purpose = form.string("purpose", "", allowed=PURPOSES)
    expiry = read_expiry(form, "expires_after")
    upload = form.raw_value("file")
    if upload is None:
        raise form.missing_member("file")
    if not isinstance(upload, UploadedFile):
        raise form.mistyped_member("file", "one file")
    limit = context.records.largest_record
    if len(upload.content) > limit:
        size = len(upload.content)
        message = f"The file has {size} bytes; this server stores files of {limit} bytes at most."
        raise TooLarge(message, size=size, limit=limit)
    file_id = f"file-{context.unique_id}"
    name = (upload.filename or "file")[:MAX_FILENAME]
    return json_answer(
        save_file(context.records, file_id, upload.content, name, purpose, created=context.created, expiry=expiry)
    )


def read_expiry(fields: Fields, name: str) -> int | None:
    """Return after how many seconds a file expires; None: it is kept as long as others. Raises BadRequest."""
    expiry = fields.object(name)
    if expiry is None:
        return None
    for member in ("anchor", "seconds"):
        if not expiry.has_value(member):
            raise expiry.missing_member(member)
    expiry.string("anchor", "", allowed=(EXPIRY_ANCHOR,))
    return expiry.integer("seconds", MAX_EXPIRY, MIN_EXPIRY, MAX_EXPIRY)


def save_file(
    records: TenantRecords,
    file_id: str,
    content: bytes,
    filename: str,
    purpose: str,
    *,
    created: int,
    expiry: int | None,
) -> FileObject:
    """Keep a file, and return it as clients get it. ``expiry``: in seconds."""
    file: FileObject = {
        "id": file_id,
        "object": "file",
        "bytes": len(content),
        "created_at": created,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": None if expiry is None else created + expiry,
    }
    save_content(records, file_id, content)
    FILES.save(records, file_id, created, encode_json(file))
    return file


def find_uploaded_file(records: TenantRecords, file_id: str, now: int) -> FileObject | None:
    """Return a file, None if there is none or it has expired by now."""
    data = FILES.find(records, file_id)
    return None if data is None else _unexpired_file(data, now)


def _unexpired_file(data: bytes, now: int) -> FileObject | None:
    file = msgspec.json.decode(data, type=FileObject)
    return None if file["expires_at"] is not None and file["expires_at"] <= now else file


def answer_openai_file(body: bytes, context: RequestContext) -> Answer:
    """Return a file without its content. Raises UnknownRecord."""
    return json_answer(_load_file(context))


def answer_openai_content(body: bytes, context: RequestContext) -> Answer:
    """Return the content of a file. Raises UnknownRecord."""
    file = _load_file(context)
    content = find_content(context.records, file["id"])
    if content is None:
        raise UnknownRecord(f"The content of the file {excerpt(file['id'])} is not stored any more.")
    return Answer(200, content, CONTENT_TYPE)


def delete_openai_file(body: bytes, context: RequestContext) -> Answer:
    """Delete a file. Raises UnknownRecord."""
    file = _load_file(context)
    delete_content(context.records, file["id"])
    context.records.delete_record(FILES.record_name(file["id"], file["created_at"]))
    return json_answer({"id": file["id"], "object": "file", "deleted": True})


def with_uploaded_file(part: Fields, data_member: str, context: RequestContext) -> Fields:
    """Return a part with the file that its ``file_id`` names in ``data_member``: as a data: URL, with the type that the
    file's name says.

    Raises BadRequest, TooLarge, and UnknownRecord if there is no such file.
    """
    for name in ("image_url", "file_data", "file_url"):
        if part.has_value(name):
            raise part.member_error("file_id", f"not allowed together with '{name}'.")
    file_id, path = part.string("file_id", "", cap=object_lists.MAX_ID), part.member_path("file_id")
    file = find_uploaded_file(context.records, file_id, context.created)
    content = None if file is None else read_named_file(context, file_id)
    if file is None or content is None:
        raise UnknownRecord(f"No such File object: {excerpt(file_id)}.", field=path)
    data_url = f"data:{guess_media_type(file['filename'])};base64,{base64.b64encode(content).decode()}"
    return part.with_moved_member(data_member, data_url, "file_id")


def list_openai_files(body: bytes, context: RequestContext) -> Answer:
    """List files, those of a purpose if the query names one. Raises BadRequest."""
    query = object_lists.read_query(context)
    purpose = query.string("purpose", None, cap=object_lists.MAX_ID)
    list_query = object_lists.read_list_query(query, default_limit=MAX_LISTED, max_limit=MAX_LISTED)
    after = None
    if list_query.after is not None:
        before = find_uploaded_file(context.records, list_query.after, context.created)
        if before is None:
            raise InvalidValue(f"Invalid 'after': there is no file {excerpt(list_query.after)}.", field="after")
        after = FILES.record_name(before["id"], before["created_at"])

    def read_listed(data: bytes) -> FileObject | None:
        file = _unexpired_file(data, context.created)
        return file if file is not None and purpose in (None, file["purpose"]) else None

    page, has_more = FILES.list_page(
        context.records, read_listed, limit=list_query.limit, after=after, newest_first=list_query.newest_first
    )
    return json_answer(object_lists.list_object(page, has_more=has_more))


def _load_file(context: RequestContext) -> FileObject:
    file = find_uploaded_file(context.records, context.path_parts["id"], context.created)
    if file is None:
        raise UnknownRecord(f"No such File object: {excerpt(context.path_parts['id'])}.")
    return file
