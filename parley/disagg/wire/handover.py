"""What an instance that begins requests tells one that goes on with them, and what a coordinator keeps to resume one.

All of it is the request as it came and the engine's outputs until now: who goes on reads the one and renders the others
again, and is then where the other was. Pure: data and bytes; knows no links, no engines and no exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from parley.disagg.wire.headers import ORDERS, OWN
from parley.errors import ContextLength, Malformed
from parley.types import Batch, Output, Work

VERSION = 1

# Headers of one connection, and of how a body came by it.
CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"content-encoding", b"expect", b"te",
     b"trailer", b"upgrade")
)  # fmt: skip


class Begun(msgspec.Struct, kw_only=True):
    """A request that another instance is to go on with.

    ``id``, ``client``: of the order, as in ``heads``. ``unique``, ``created``: what its answer shows of it. ``spent``:
    seconds since it came. ``apis``: of the port to which it came. ``body``: without a coding. ``tenant``: on whose
    behalf it is. ``past``: outputs of attempts before this one. ``prompt``: the ids of its tokens, where the body does
    not say them. ``digest``: of the adapter's content, if it has one.
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
    """Raises Malformed."""
    try:
        made = _BEGUN.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(f"The hand-over cannot be read: {error}") from None
    if made.version != VERSION:
        raise Malformed(f"The hand-over has version {made.version}; this instance knows {VERSION}.")
    return made


def strip(headers: dict[bytes, bytes]) -> None:
    """Leave the headers that the client sent. A plain coordinator's req-id stays: answers of MindIE's APIs carry it;
    parley's own says which one the client gave, if it did."""
    extended, label = OWN + b"results" in headers, headers.get(OWN + b"label")
    stays = b"" if extended else b"req-id"
    for name in [name for name in headers if name != stays and (name in ORDERS or name.startswith(OWN))]:
        del headers[name]
    if extended and label is not None:
        headers[b"req-id"] = label


# -- records: the outputs behind some bytes of an answer


def record(batches: Sequence[Batch]) -> bytes:
    """Outputs that were rendered one after the other."""
    return encode([each for batch in batches for each in batch])


def join(records: Iterable[bytes]) -> bytes:
    """Records in order as one: what stands before the body of a request that is to be resumed."""
    return encode([msgspec.Raw(each) for each in records])


def split(data: bytes) -> list[Batch]:
    """The outputs of joined records. Raises Malformed."""
    try:
        return _RECORDS.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(f"The records of a request cannot be read: {error}") from None


# -- what follows from outputs for the works that go on


def drawn(past: Sequence[Batch], works: Sequence[Work]) -> list[list[list[int]]]:
    """The tokens that each choice of each work has by now. Raises Malformed."""
    made: list[list[list[int]]] = [[[] for _ in range(work.n)] for work in works]
    try:
        for number, output in _each(past):
            made[number][output.index] += output.token_ids
    except IndexError:
        raise Malformed("The outputs so far are of another request.") from None
    return made


def resume(work: Work, tokens: list[list[int]]) -> None:
    """Have a work go on behind these tokens of its choices."""
    if work.beam is None and any(tokens):
        work.given = tokens


def restore(works: Sequence[Work], prompt: list[int] | None, context: int) -> None:
    """Begin the one work with these token ids, where the body did not say its prompt. Raises ContextLength,
    Malformed."""
    if prompt is None:
        return
    if len(works) != 1:
        raise Malformed("A request that goes on with token ids has one prompt.")
    if len(prompt) >= context:
        told = f"The prompt has {len(prompt)} tokens; the model's context has {context}."
        raise ContextLength(told, field="prompt", limit=context, prompt=len(prompt))
    (work,) = works
    work.token_ids = prompt
    work.max_tokens = min(work.max_tokens, context - len(prompt))


def engine_lost(state: str, outputs: Sequence[Output]) -> bool:
    """Whether these outputs say that the engine, whose state this is, was lost with the request in it."""
    return state != "ready" and any(output.finish == "error" for output in outputs)


def first(number: int, work: Work, tokens: Sequence[list[int]], past: Sequence[Batch]) -> int:
    """How many tokens a choice of work ``number`` has at most until another instance goes on, where they have these.

    All that are open have one more then; if none is, nobody goes on. A search begins where the prompt ends, so there
    the one token is nobody's.
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
