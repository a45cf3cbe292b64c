"""Files that clients upload, list and delete, and whose ids later messages name (``file_sources.py``)."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs

from parley.dialects.anthropic.api_headers import VERSION_HEADER
from parley.dialects.anthropic.batches import ID_SCHEMA, PAGE_QUERY, iso_time
from parley.dialects.anthropic.file_sources import FILES, StoredFile, find_source_file, load_file, unexpired_file
from parley.dialects.anthropic.models import read_page_limit
from parley.dialects.anthropic.refusal_wording import ANTHROPIC_WORDING
from parley.dialects.file_types import guess_media_type
from parley.dialects.form_data import UploadedFile, decode_form
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.dialects.stored_files import delete_content, save_content
from parley.errors import BadRequest, TooLarge, Unsupported, excerpt

MIN_EXPIRY, MAX_EXPIRY = 3600, 90 * 86_400  # seconds
MAX_FILENAME = 500  # characters
MAX_LISTED_IDS = 100  # that a query may name
ANY_TYPE = "application/octet-stream"
MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,127}/[a-z0-9!#$&^_.+-]{1,127}")  # RFC 6838
PAGE_TOKEN = re.compile(r"page_(\d{12})_(file_\w{1,128})")


def upload_anthropic_file(body: bytes, context: RequestContext) -> Answer:
    """Keep a file. Raises BadRequest, TooLarge."""
    form = decode_form(body, context.headers.get(b"content-type", b""), ("file",))
    if not context.records.are_kept:
        raise Unsupported("This server stores no files.")
    upload = form.raw_value("file")
    if upload is None:
        raise ANTHROPIC_WORDING.missing_error("file")
    if not isinstance(upload, UploadedFile):
        raise ANTHROPIC_WORDING.invalid_error("file", "must be one file")
    lifetime = form.integer("expires_in_seconds", None, MIN_EXPIRY, MAX_EXPIRY)
    size, limit = len(upload.content), context.records.largest_record
    if size > limit:
        raise TooLarge(f"The file has {size} bytes; this server stores {limit} at most.", size=size, limit=limit)
    filename = PurePosixPath(upload.filename or "").name[-MAX_FILENAME:] or "unnamed"
    expires = None if lifetime is None else context.created + lifetime
    file: dict[str, Any] = {
        "type": "file",
        "id": f"file_{context.unique_id}",
        "size_bytes": size,
        "created_at": iso_time(context.created),
        "filename": filename,
        "mime_type": _media_type(upload, filename),
        "downloadable": False,
        "expires_at": None if expires is None else iso_time(expires),
    }
    save_content(context.records, file["id"], upload.content)
    FILES.save(context.records, file["id"], context.created, encode_json(StoredFile(file, context.created, expires)))
    return json_answer(file)


def _media_type(upload: UploadedFile, filename: str) -> str:
    """Return the media type that the client gives, or else the one of the file's name."""
    if upload.media_type not in ("", ANY_TYPE) and MEDIA_TYPE.fullmatch(upload.media_type):
        return upload.media_type
    return guess_media_type(filename) or ANY_TYPE


def answer_anthropic_file(body: bytes, context: RequestContext) -> Answer:
    """Return a file without its content. Raises UnknownRecord."""
    return json_answer(load_file(context, context.path_parts["id"]).file)


def answer_anthropic_content(body: bytes, context: RequestContext) -> Answer:
    """Refuse to return a file that its client has uploaded, as the original does. Raises UnknownRecord, BadRequest."""
    stored = load_file(context, context.path_parts["id"])
    raise BadRequest(f"The file {excerpt(stored.file['id'])} is not downloadable, because it was uploaded.")


def delete_anthropic_file(body: bytes, context: RequestContext) -> Answer:
    """Delete a file. Raises UnknownRecord."""
    stored = load_file(context, context.path_parts["id"])
    delete_content(context.records, stored.file["id"])
    context.records.delete_record(stored.record_name)
    return json_answer({"id": stored.file["id"], "type": "file_deleted"})


def list_anthropic_files(body: bytes, context: RequestContext) -> Answer:
    """Return a page of files, the newest first. Raises InvalidValue.

    The query has ``limit``, and ``page`` of an earlier answer or, in the API's older form, ``after_id`` or
    ``before_id``; or it names files by ``ids[]``.
    """
    query = parse_qs(context.query_string.decode("latin-1"))
    if ids := (query.get("ids[]") or query.get("ids")):
        named = {file_id: find_source_file(context, file_id) for file_id in ids[:MAX_LISTED_IDS]}
        return _page_answer([stored for stored in named.values() if stored is not None], has_more=False)
    last = {name: values[-1] for name, values in query.items()}
    goes_back = "before_id" in last and not {"page", "after_id"} & last.keys()

    def read_listed(data: bytes) -> StoredFile | None:
        return unexpired_file(data, context.created)

    page, has_more = FILES.list_page(
        context.records,
        read_listed,
        limit=read_page_limit(last.get("limit")),
        after=_first_name(last, context),
        newest_first=not goes_back,
    )
    return _page_answer(page[::-1] if goes_back else page, has_more=has_more)


def _first_name(query: dict[str, str], context: RequestContext) -> str | None:
    """Return the name of the record before a page, None for the first page. Raises InvalidValue."""
    if (token := query.get("page")) is not None:
        match = PAGE_TOKEN.fullmatch(token)
        if match is None:
            raise ANTHROPIC_WORDING.invalid_error("page", f"{excerpt(token)} is not the next_page of a list")
        return FILES.record_name(match[2], int(match[1]))
    for name in ("after_id", "before_id"):
        if (file_id := query.get(name)) is not None:
            stored = find_source_file(context, file_id)
            if stored is None:
                raise ANTHROPIC_WORDING.invalid_error(name, f"there is no file {excerpt(file_id)}")
            return stored.record_name
    return None


def _page_answer(page: list[StoredFile], *, has_more: bool) -> Answer:
    last = page[-1] if page else None
    next_page = f"page_{last.created:012d}_{last.file['id']}" if last is not None and has_more else None
    return json_answer(
        {
            "data": [stored.file for stored in page],
            "has_more": has_more,
            "first_id": page[0].file["id"] if page else None,
            "last_id": None if last is None else last.file["id"],
            "next_page": next_page,
        }
    )


ROUTES = (
    Route("POST", "/v1/files", "stored", reader=upload_anthropic_file, reads_form=True, claiming_header=VERSION_HEADER),
    Route(
        "GET",
        "/v1/files",
        "stored",
        reader=list_anthropic_files,
        reads_many=True,
        claiming_header=VERSION_HEADER,
        query={**PAGE_QUERY, "page": ID_SCHEMA},
    ),
    Route("GET", "/v1/files/{id}", "stored", reader=answer_anthropic_file, claiming_header=VERSION_HEADER),
    Route("DELETE", "/v1/files/{id}", "stored", reader=delete_anthropic_file, claiming_header=VERSION_HEADER),
    Route("GET", "/v1/files/{id}/content", "stored", reader=answer_anthropic_content, claiming_header=VERSION_HEADER),
)
