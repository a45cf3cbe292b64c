"""The messages that hand a request over to another instance, and the records that let a coordinator resume it.

Both contain the original request and the engine's outputs so far. The next instance parses the request again, renders
the outputs again, and is then in the same state. Pure data and bytes: no links, engines or HTTP exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from parley.disagg.wire.headers import ORDERS, OWN
from parley.errors import ContextLength, Malformed
from parley.types import Batch, Output, Work

VERSION = 1

# Hop-by-hop headers, and headers that describe how a body was transferred.
CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"content-encoding", b"expect", b"te",
     b"trailer", b"upgrade")
)  # fmt: skip


class Begun(msgspec.Struct, kw_only=True):
    """A request that another instance continues.

    ``id``, ``client``: from the ``PrefillCommand``, see ``headers``. ``unique``, ``created``: request UUID and creation
    time, as shown in the answer. ``spent``: seconds since the request arrived. ``apis``: the APIs of the port where it
    arrived. ``body``: without content coding. ``tenant``: the owner of the request. ``past``: outputs of earlier
    attempts. ``prompt``: its token ids, if the body does not contain the prompt. ``digest``: of the LoRA adapter's
    content, if the request uses an adapter.
    """

    version: int
    id: str
    client: str
    unique: str
    created: int
    spent: float
    apis: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    tenant: str
    past: list[Batch] | None
    prompt: list[int] | None
    digest: str


_BEGUN = msgspec.msgpack.Decoder(Begun)
_RECORDS = msgspec.msgpack.Decoder(list[Batch])
encode = msgspec.msgpack.Encoder().encode


def begin(data: bytes) -> Begun:
    """Decode the message that begins a handover. Raises Malformed."""
    try:
        made = _BEGUN.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(f"The handover message cannot be decoded: {error}") from None
    if made.version != VERSION:
        raise Malformed(f"The handover message has version {made.version}; this instance supports version {VERSION}.")
    return made


def strip(headers: dict[bytes, bytes]) -> None:
    """Remove all headers except those of the client. With MindIE's coordinator, req-id stays because answers of
    MindIE's APIs contain it; with parley's coordinator, req-id becomes the id that the client sent, if any."""
    extended, label = OWN + b"results" in headers, headers.get(OWN + b"label")
    stays = b"" if extended else b"req-id"
    for name in [name for name in headers if name != stays and (name in ORDERS or name.startswith(OWN))]:
        del headers[name]
    if extended and label is not None:
        headers[b"req-id"] = label


# -- records: the engine outputs that some bytes of an answer were rendered from


def record(batches: Sequence[Batch]) -> bytes:
    """Encode outputs in rendering order."""
    return encode([each for batch in batches for each in batch])


def join(records: Iterable[bytes]) -> bytes:
    """Join records in order. The result precedes the body when a coordinator resumes the request."""
    return encode([msgspec.Raw(each) for each in records])


def split(data: bytes) -> list[Batch]:
    """Decode joined records into outputs. Raises Malformed."""
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(f"The output records of the request cannot be decoded: {error}") from None


# -- continuing engine requests from earlier outputs


def drawn(past: Sequence[Batch], works: Sequence[Work]) -> list[list[list[int]]]:
    """Return the tokens so far, by engine request and choice. Raises Malformed."""
    made: list[list[list[int]]] = [[[] for _ in range(work.n)] for work in works]
    try:
        for number, output in _each(past):
            made[number][output.index] += output.token_ids
    except IndexError:
        raise Malformed("The earlier outputs belong to another request.") from None
    return made


def resume(work: Work, tokens: list[list[int]]) -> None:
    """Let an engine request continue after these tokens of its choices."""
    if work.beam is None and any(tokens):
        work.given = tokens


def restore(works: Sequence[Work], prompt: list[int] | None, context: int) -> None:
    """Replace the prompt of the only engine request by these token ids, if the body did not contain it. Raises
    ContextLength, Malformed."""
    if prompt is None:
        return
    if len(works) != 1:
        raise Malformed("A request that continues with token ids must have exactly one prompt.")
    if len(prompt) >= context:
        told = f"The prompt has {len(prompt)} tokens; the model's context has {context}."
        raise ContextLength(told, field="prompt", limit=context, prompt=len(prompt))
    (work,) = works
    work.token_ids = prompt
    work.max_tokens = min(work.max_tokens, context - len(prompt))


def engine_lost(state: str, outputs: Sequence[Output]) -> bool:
    """Whether these outputs failed because the engine, now in ``state``, died."""
    return state != "ready" and any(output.finish == "error" for output in outputs)


def first(number: int, work: Work, tokens: Sequence[list[int]], past: Sequence[Batch]) -> int:
    """Return the output limit of request ``number`` for the prefill stage, given the tokens so far.

    At this limit every open choice has one new token; if no choice is open, the request ends in this stage. A beam
    search begins at the end of the prompt, so its one token is discarded.
    """
    over = {output.index for of, output in _each(past) if of == number and output.finish is not None}
    if len(over) == work.n:
        return work.max_tokens
    if work.beam is not None:
        return 1
    return 1 + max((len(each) for index, each in enumerate(tokens) if index not in over), default=0)


def _each(past: Sequence[Batch]) -> Iterator[tuple[int, Output]]:
    for batch in past:
        yield from batch
