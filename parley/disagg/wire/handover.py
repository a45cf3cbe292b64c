"""The messages that hand a request over to another instance, and the records that let a coordinator resume it.

Both contain the original request and the engine's outputs so far. The next instance parses the request again, renders
the outputs again, and is then in the same state. Pure data and bytes: no links, engines or HTTP exchanges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from parley.core.media.encode_queue import FEATURES_ELSEWHERE
from parley.disagg.wire.headers import CLIENT_ID_HEADER, COMMAND_HEADERS, NATIVE_PREFIX, RECORDS_HEADER, is_native
from parley.errors import ContextLength, MalformedBody
from parley.types import PING_NUMBER, EngineOutput, EngineRequest, OutputBatch, ProcessedMedia, Tenant

HANDOVER_VERSION = 2  # a field with another name in the message keeps it until the version changes

# Hop-by-hop headers, and headers that describe how a body was transferred.
CONNECTION_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"content-encoding", b"expect", b"te",
     b"trailer", b"upgrade")
)  # fmt: skip


class HandoverMessage(msgspec.Struct, kw_only=True):
    """A request that another instance continues.

    * ``id``, ``client``: from the ``PrefillCommand``, see ``headers``.
    * ``request_uuid``, ``created``: as the answer shows them.
    * ``elapsed``: seconds since the request arrived.
    * ``port_apis``: the APIs of the port where it arrived.
    * ``body``: without content coding.
    * ``tenant``: the owner of the request, whose key is called ``key_name``.
    * ``limits_counted``: a coordinator counts its limits and its usage.
    * ``prior_outputs``: outputs of earlier attempts.
    * ``prompt_ids``: the prompt's token ids, if the body does not contain it.
    * ``adapter_digest``: of the LoRA adapter's content, if the request uses an adapter.
    * ``media``: the request's media as the prefill instance processed them, without their features: this instance
      receives pages, and decodes no media.
    * ``features``: by digest, the content of the feature files of items that continue after the last full page, because
      this instance computes the tokens there.
    """

    version: int
    id: str
    client: str
    request_uuid: str = msgspec.field(name="unique")
    created: int
    elapsed: float = msgspec.field(name="spent")
    port_apis: str = msgspec.field(name="apis")
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    tenant: Tenant
    key_name: str = ""
    limits_counted: bool = False
    prior_outputs: list[OutputBatch] | None = msgspec.field(name="past")
    prompt_ids: list[int] | None = msgspec.field(name="prompt")
    adapter_digest: str = msgspec.field(name="digest")
    media: list[ProcessedMedia] = []
    features: dict[bytes, bytes] = {}


_MESSAGE_DECODER = msgspec.msgpack.Decoder(HandoverMessage)
_RECORDS_DECODER = msgspec.msgpack.Decoder(list[OutputBatch])
encode_msgpack = msgspec.msgpack.Encoder().encode


def decode_handover(data: bytes) -> HandoverMessage:
    """Decode the message that begins a handover. Raises MalformedBody."""
    try:
        message = _MESSAGE_DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedBody(f"The handover message cannot be decoded: {error}") from None
    if message.version != HANDOVER_VERSION:
        raise MalformedBody(
            f"The handover message has version {message.version}; this instance supports version {HANDOVER_VERSION}."
        )
    return message


def strip_cluster_headers(headers: dict[bytes, bytes]) -> None:
    """Remove all headers except those of the client and ``RECORDS_HEADER``.

    With MindIE's coordinator, req-id stays because answers of MindIE's APIs contain it; with parley's coordinator,
    req-id becomes the id that the client sent, if any.
    """
    native, client_request_id = is_native(headers), headers.get(CLIENT_ID_HEADER)
    kept_names = (RECORDS_HEADER,) if native else (b"req-id",)
    for name in [
        name
        for name in headers
        if name not in kept_names and (name in COMMAND_HEADERS or name.startswith(NATIVE_PREFIX))
    ]:
        del headers[name]
    if native and client_request_id is not None:
        headers[b"req-id"] = client_request_id


# -- records: the engine outputs that some bytes of an answer were rendered from


def encode_record(batches: Sequence[OutputBatch]) -> bytes:
    """Encode outputs in rendering order."""
    return encode_msgpack([record for batch in batches for record in batch])


def ping_record() -> OutputBatch:
    """Return the record of a ping: an API may number its pings, and the next instance continues the count."""
    return [(PING_NUMBER, EngineOutput("", 0))]


def join_records(records: Iterable[bytes]) -> bytes:
    """Join records in order. The result precedes the body when a coordinator resumes the request."""
    return encode_msgpack([msgspec.Raw(record) for record in records])


def split_records(data: bytes) -> list[OutputBatch]:
    """Decode joined records into outputs. Raises MalformedBody."""
    try:
        return _RECORDS_DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedBody(f"The output records of the request cannot be decoded: {error}") from None


def count_output_tokens(records: Iterable[bytes]) -> int:
    """Return the number of tokens in records. Raises MalformedBody."""
    outputs = _iterate_outputs(split_records(join_records(records)))
    return sum(len(output.token_ids) for _, output in outputs)


# -- continuing engine requests from earlier outputs


def collect_prior_tokens(
    prior_outputs: Sequence[OutputBatch], engine_requests: Sequence[EngineRequest]
) -> list[list[list[int]]]:
    """Return the tokens so far, by engine request and choice. Raises MalformedBody."""
    tokens: list[list[list[int]]] = [[[] for _ in range(engine_request.n)] for engine_request in engine_requests]
    try:
        for number, output in _iterate_outputs(prior_outputs):
            if number < 0 or output.index < 0:  # would count from the end
                raise IndexError
            tokens[number][output.index] += output.token_ids
    except IndexError:
        raise MalformedBody("The earlier outputs belong to another request.") from None
    return tokens


def set_prior_tokens(engine_request: EngineRequest, tokens: list[list[int]]) -> None:
    """Let an engine request continue after these tokens of its choices."""
    if engine_request.beam is None and any(tokens):
        engine_request.prior_tokens = tokens


def take_transfers(batches: Iterable[OutputBatch]) -> dict[int, bytes]:
    """Remove the transfers from outputs; return them by number of the engine request. Each can be used once."""
    transfers: dict[int, bytes] = {}
    for number, output in _iterate_outputs(batches):
        if output.transfer:
            transfers[number], output.transfer = output.transfer, b""
    return transfers


def restore_prompt(
    engine_requests: Sequence[EngineRequest],
    prompt: list[int] | None,
    context: int,
    placeholder_ids: Collection[int] = (),
) -> None:
    """Replace the prompt of the only engine request by these token ids, if the body did not contain it.

    ``placeholder_ids``: the tokens that stand for embeddings of media. Raises ContextLength, MalformedBody.
    """
    if prompt is None:
        return
    if not set(prompt).isdisjoint(placeholder_ids):
        raise MalformedBody(
            "The prompt has the tokens of images, video or audio, but the request does not contain them."
        )
    if len(engine_requests) != 1:
        raise MalformedBody("A request that continues with token ids must have exactly one prompt.")
    if len(prompt) >= context:
        message = f"The prompt has {len(prompt)} tokens; the model's context has {context}."
        raise ContextLength(message, field="prompt", limit=context, prompt=len(prompt))
    (engine_request,) = engine_requests
    engine_request.token_ids = prompt
    engine_request.max_tokens = min(engine_request.max_tokens, context - len(prompt))


def items_beyond_pages(engine_requests: Iterable[EngineRequest], page_size: int) -> set[bytes]:
    """Return the digests of items that the next instance needs even if it gets all pages: items with tokens in the
    incomplete last page, and all items if it computes the prompt's log-probabilities. ``page_size``: in tokens."""
    digests: set[bytes] = set()
    for request in engine_requests:
        paged = 0 if request.prompt_logprobs >= 0 else (len(request.token_ids) - 1) // page_size * page_size
        digests.update(item.digest for item in request.media if item.end > paged)
    return digests


def engine_was_lost(state: str, outputs: Sequence[EngineOutput]) -> bool:
    """Whether these outputs failed because the engine, now in ``state``, died."""
    return state != "ready" and any(output.finish_reason == "error" for output in outputs)


def media_pages_were_lost(outputs: Sequence[EngineOutput]) -> bool:
    """Whether these outputs failed because only an instance that processes the request's media can continue."""
    return any(output.error == FEATURES_ELSEWHERE for output in outputs)


def prefill_output_limit(
    number: int, engine_request: EngineRequest, tokens: Sequence[list[int]], prior_outputs: Sequence[OutputBatch]
) -> int:
    """Return the output limit of request ``number`` for the prefill stage, given the tokens so far.

    At this limit every open choice has one new token; if no choice is open, the request ends in this stage. A beam
    search begins at the end of the prompt, so its one token is discarded.
    """
    finished = {
        output.index
        for of, output in _iterate_outputs(prior_outputs)
        if of == number and output.finish_reason is not None
    }
    if len(finished) == engine_request.n:
        return engine_request.max_tokens
    if engine_request.beam is not None:
        return 1
    return 1 + max(
        (len(choice_tokens) for index, choice_tokens in enumerate(tokens) if index not in finished), default=0
    )


def _iterate_outputs(prior_outputs: Iterable[OutputBatch]) -> Iterator[tuple[int, EngineOutput]]:
    for batch in prior_outputs:
        yield from (numbered for numbered in batch if numbered[0] != PING_NUMBER)
