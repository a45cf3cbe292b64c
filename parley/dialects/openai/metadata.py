"""The client's own pairs of texts that objects are stored with."""

from __future__ import annotations

from parley.dialects.fields import Fields

MAX_PAIRS = 16
MAX_KEY, MAX_VALUE = 64, 512  # characters


def read_metadata(body: Fields) -> dict[str, str]:
    """Return the client's own pairs. Raises BadRequest."""
    pairs = body.free_object("metadata")
    if len(pairs) > MAX_PAIRS:
        raise body.member_error("metadata", f"at most {MAX_PAIRS} pairs are allowed, but there are {len(pairs)}.")
    metadata = body.object("metadata")
    for name in pairs:
        assert metadata is not None
        if len(name) > MAX_KEY:
            raise body.member_error("metadata", f"keys have at most {MAX_KEY} characters, but one has {len(name)}.")
        metadata.string(name, None, cap=MAX_VALUE)
    return {name: value for name, value in pairs.items() if value is not None}
