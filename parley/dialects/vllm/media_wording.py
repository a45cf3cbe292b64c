"""vLLM's sentences about images, video and audio that cannot be used, and their statuses.

In the original, a URL that cannot be fetched through the client's fault is a 422. Here that holds for every such URL:
the fault of another server is no error of this one.
"""

from __future__ import annotations

from http import HTTPStatus

from parley.errors import BadMedia, MediaFault

UNPROCESSABLE: frozenset[MediaFault] = frozenset({"unreachable", "not_found"})
UNPROCESSABLE_TYPE = "UnprocessableEntityError"
# The rest of the sentence "Failed to load image: …".
LOADING_FAULTS: dict[MediaFault, str] = {
    "bad_base64": "the data is not valid base64",
    "unknown_format": "the format is not supported",
    "undecodable": "the data is damaged",
    "too_slow": "it took too long to decode",
    "refused_by_model": "the model does not accept it",
    "bad_embeddings": "the data is not a safetensors file of embeddings that fit the model",
}
BAD_SCHEME = "The URL must be either a HTTP, data or file URL."
BAD_DATA_URL = "Only base64 data URLs are supported for now."
TOO_MANY = "At most {limit} {kind}(s) may be provided in one prompt."
RAISE_LIMIT = " Set `--limit-mm-per-prompt` to increase this limit."
FOREIGN_HOST = "The URL must be from one of the allowed domains: {allowed}. Input URL domain: {host}"
NO_FOLDER = "Cannot load local files without `--allowed-local-media-path`."
CACHE_MISS = "Cache miss for {kind} at index {index} but data is not provided"


def media_error_members(error: BadMedia) -> tuple[int, str, str]:
    """Return the status, type and sentence of an error about an item."""
    if _concerns_url(error):
        return HTTPStatus.UNPROCESSABLE_ENTITY, UNPROCESSABLE_TYPE, _fetch_sentence(error)
    return HTTPStatus.BAD_REQUEST, "BadRequestError", _media_sentence(error)


def _concerns_url(error: BadMedia) -> bool:
    """Whether the item could not be fetched, rather than not used."""
    match error.reason:
        case "bad_address":
            return "schemes" not in error.detail
        case "too_large":
            return "host" in error.detail
    return error.reason in UNPROCESSABLE


def _fetch_sentence(error: BadMedia) -> str:
    detail = error.detail
    match error.reason:
        case "too_large":
            fault = f"The {error.kind} exceeds the limit of {detail['limit']} bytes"
        case "not_found":
            fault = "File not found"
        case "bad_address":
            fault = "Invalid URL"
        case _:
            fault = f"HTTP {detail['status']} error" if "status" in detail else "Connection error"
    return f"Failed to fetch media from URL: {fault}"


def _media_sentence(error: BadMedia) -> str:
    kind, detail = error.kind, error.detail
    match error.reason:
        case "too_many":
            limit = detail.get("limit", 0)
            return TOO_MANY.format(limit=limit, kind=kind) + (RAISE_LIMIT if limit else "")
        case "bad_address":
            return BAD_SCHEME
        case "bad_data_url":
            return BAD_DATA_URL
        case "forbidden_address":
            if "host" not in detail:
                return NO_FOLDER
            return FOREIGN_HOST.format(allowed=detail.get("allowed", "[]"), host=detail["host"])
        case "unknown_uuid":
            return CACHE_MISS.format(kind=kind, index=detail.get("index", 0))
        case reason if reason in LOADING_FAULTS:
            return f"Failed to load {kind}: {LOADING_FAULTS[reason]}"
    return f"Failed to load {kind}: {error.message}"
