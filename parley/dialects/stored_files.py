"""The contents of files that clients keep on a server: the input and the results of batches. Each is a record."""

from __future__ import annotations

from parley.dialects.records import TenantRecords
from parley.dialects.request_context import RequestContext
from parley.errors import TooLarge

CONTENT_PREFIX = "content/"
MAX_NAMED_BYTES = 64 << 20  # of the files that a request names, each as often as it is named: as in the largest body


def content_name(file_id: str) -> str:
    """Return the name of the record with the content of a file."""
    return CONTENT_PREFIX + file_id


def save_content(records: TenantRecords, file_id: str, content: bytes) -> None:
    """Keep the content of a file."""
    records.save_record(content_name(file_id), content)


def find_content(records: TenantRecords, file_id: str) -> bytes | None:
    """Return the content of a file, None if there is none any more."""
    return records.find_record(content_name(file_id))


def read_named_file(context: RequestContext, file_id: str) -> bytes | None:
    """Return the content of a file that a request names, None if there is none any more.

    A short body may name a large file thousands of times, so the files are counted. Raises TooLarge.
    """
    content = find_content(context.records, file_id)
    if content is None:
        return None
    context.named_bytes += len(content)
    if context.named_bytes > MAX_NAMED_BYTES:
        sentence = f"The files that the request names have more than {MAX_NAMED_BYTES} bytes together"
        raise TooLarge(f"{sentence}; a file counts as often as it is named.", limit=MAX_NAMED_BYTES)
    return content


def delete_content(records: TenantRecords, file_id: str) -> None:
    """Drop the content of a file, if there is one."""
    records.delete_record(content_name(file_id))
