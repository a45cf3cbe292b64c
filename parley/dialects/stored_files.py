"""The contents of files that clients keep on a server: the input and the results of batches. Each is a record."""

from __future__ import annotations

from parley.dialects.records import TenantRecords

CONTENT_PREFIX = "content/"


def content_name(file_id: str) -> str:
    """Return the name of the record with the content of a file."""
    return CONTENT_PREFIX + file_id


def save_content(records: TenantRecords, file_id: str, content: bytes) -> None:
    """Keep the content of a file."""
    records.save_record(content_name(file_id), content)


def find_content(records: TenantRecords, file_id: str) -> bytes | None:
    """Return the content of a file, None if there is none any more."""
    return records.find_record(content_name(file_id))


def delete_content(records: TenantRecords, file_id: str) -> None:
    """Drop the content of a file, if there is one."""
    records.delete_record(content_name(file_id))
