"""The form of MindIE's refusals of invalid requests."""

from __future__ import annotations

import json

from parley.dialects.mindie import STRICT
from parley.errors import ParleyError


def validation_error(error: ParleyError) -> str:
    """Return the text of an error, after a check that MindIE's form of it is that of an invalid request."""
    answer = STRICT.render_error(error)
    body = json.loads(answer.body)
    assert (answer.status, list(body), body["error_type"]) == (422, ["error", "error_type"], "Input Validation Error")
    text: str = body["error"]
    return text
