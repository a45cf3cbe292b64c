"""Prompt hashes for cache-affine routing: chained hashes of a body's prompt, and an estimate of its length.

The coordinator routes by them, and instances report the hashes of prompts that they computed. Both see the same bytes,
so both compute the same hashes. Bodies are not parsed beyond the members that hold the prompt, which each dialect
declares (``PromptMembers``). The hash covers the JSON text of tools and prompt as the client wrote it, or the prompt in
a gRPC message, salted with the model, the cache salt and, where tenants share no prefixes, the tenant. Hashes are taken
at marks whose distance grows with the position, so that a megabyte has about sixty. The base64 text of a medium is
replaced by MEDIA_SIZE characters made of its digest, because its length says little about its number of tokens.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.json_body import check_json_size
from parley.dialects.mounts import API_MOUNTS, INNER_MOUNTS

CHARACTERS_PER_TOKEN = 4.02  # also the default of the cluster's ``string_token_rate``
FIRST_MARK, MARK_STEP, MARK_GROWTH = 128, 128, 1.125
MAX_REPORTED_HASHES = 4096  # most hashes in an instance's status report
MAX_BODY_SIZE = 64 << 20  # bytes; bodies are never longer
MEDIA_SIZE = 1024  # characters that stand for an image, video or clip; shorter ones stay as they are
DATA_MARK = b";base64,"  # precedes the data in a data: URL
# The members whose long values are media even without that mark, if they look like base64.
MEDIA_VALUE_MARKS = (b'"data"', b'"image_url"', b'"url"')
VALUE_START = re.compile(rb'\s*:\s*(?:\[\s*)?"(?=[A-Za-z0-9+/=_\\-]{%d})' % MEDIA_SIZE)  # a text, or one in an array


def _compute_mark_positions() -> tuple[int, ...]:
    """Return the byte positions where hashes are taken: every 128 at first, then each an eighth further."""
    marks = [FIRST_MARK]
    while marks[-1] < MAX_BODY_SIZE:
        marks.append(max(marks[-1] + MARK_STEP, int(marks[-1] * MARK_GROWTH)))
    return tuple(marks)


MARK_POSITIONS = _compute_mark_positions()


_TEXT_DECODER = msgspec.json.Decoder(str)
_MEMBERS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST_DECODER = msgspec.json.Decoder(list[msgspec.Raw])


class PrefixMark(msgspec.Struct, frozen=True, gc=False):
    """The first ``tokens`` tokens (estimated) of a prompt, with the hash of everything up to there."""

    tokens: int
    prefix_hash: int


class ConversationHashes(msgspec.Struct, frozen=True):
    """A conversation of ``message_count`` messages: a hash of all messages, and one of all but the last two."""

    message_count: int
    full_hash: int
    earlier_hash: int


class PromptHashes(msgspec.Struct):
    """The prompt of a body.

    * ``token_count``: the estimated number of its tokens.
    * ``marks``: the marks of its prefixes, shortest first.
    * ``messages``: the JSON texts of its messages.
    * ``owner``: the tenant whose requests alone can use its prefixes, "" for all.
    """

    model: str = ""
    token_count: int = 0
    marks: Sequence[PrefixMark] = ()
    messages: bytes = b""
    owner: str = ""

    def conversation_hashes(self) -> ConversationHashes | None:
        """Hash the messages of a conversation. None for other prompts."""
        try:
            check_json_size(self.messages)
            message_texts = [bytes(message) for message in _LIST_DECODER.decode(self.messages)]
        except msgspec.MsgspecError:
            return None
        if not message_texts:
            return None
        salt = [self.owner.encode()] if self.owner else []
        return ConversationHashes(
            len(message_texts), hash_prompt_parts(salt + message_texts), hash_prompt_parts(salt + message_texts[:-2])
        )


def hash_prompt_parts(parts: Iterable[bytes]) -> int:
    """Return a hash of 48 bits, which every JSON reader preserves. The length of each part is hashed as well."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest())


class PromptReader:
    """Finds the prompt in a body, in the members that the given dialects declare.

    The dialect of a body is unknown: a coordinator and an instance may serve several APIs at the same path, in
    different manners. Hence one reader for all dialects: the first member present that may hold a prompt is the prompt.
    """

    def __init__(self, dialects: Iterable[Dialect]):
        prompt_members = [dialect.prompt_members for dialect in dialects]
        self._conversation_members = _unique_names(members.conversations for members in prompt_members)
        self._prompt_members = _unique_names(members.prompts for members in prompt_members)
        self._prefix_members = _unique_names(members.preceding for members in prompt_members)
        salt_members = sorted(_unique_names(members.salts for members in prompt_members))  # in no table's order
        self._salt_members = ("model", *salt_members)
        self._dropped_texts = list(dict.fromkeys(text for members in prompt_members for text in members.dropped_texts))
        self._scored_members = _unique_names(members.scored for members in prompt_members)
        self._media_members = _unique_names(members.media for members in prompt_members)
        self._preceding_members = frozenset((*self._prefix_members, *self._media_members))
        self._message_readers = list(
            dict.fromkeys(members.read_non_json for members in prompt_members if members.read_non_json is not None)
        )

    def hash_body(
        self, body: bytes, characters_per_token: float = CHARACTERS_PER_TOKEN, owner: str = ""
    ) -> PromptHashes:
        """Return a body's prompt, whose hashes are those of ``owner``. Any bytes are accepted: without a prompt, or in
        an unknown format, the result has no marks and length 0."""
        try:
            check_json_size(body)  # no instance takes a larger one, and each member becomes an object
            members = _MEMBERS_DECODER.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return self._hash_message(body, characters_per_token, owner)

        def member_text(name: str) -> bytes:
            return bytes(members[name]) if name in members else b""

        conversation = shrink_media(_first_present(map(member_text, self._conversation_members)))
        whole_prompt = b"" if conversation else _first_present(map(member_text, self._prompt_members))
        prompt = conversation or shrink_media(whole_prompt)
        salts = list(map(member_text, self._salt_members))
        prefix = b""
        if not self._preceding_members.isdisjoint(members):
            media = map(_digest_text, map(member_text, self._media_members))
            prefix = b"".join((*map(member_text, self._prefix_members), *media))
            for dropped_text in self._dropped_texts:
                prefix = dropped_text.sub(b"", prefix)
        text = prefix + prompt.rstrip(b']}" \t\r\n')  # without its end, a prompt is a prefix of its own continuation
        length = _estimate_tokens(prompt, characters_per_token) + int(len(prefix) / characters_per_token)
        marks = _mark_prefixes(text, _owner_salt(owner, b"\0".join(salts)), length)
        scored_lists = [texts for texts in map(member_text, self._scored_members) if texts not in (b"", whole_prompt)]
        if whole_prompt and scored_lists:
            preceding = list(map(member_text, self._prefix_members))
            length += _estimate_scored(whole_prompt, scored_lists, preceding, characters_per_token)
        return PromptHashes(_decode_name(salts[0]), length, marks, conversation, owner)

    def _hash_message(self, body: bytes, characters_per_token: float, owner: str) -> PromptHashes:
        for read_message in self._message_readers:
            model, prompt = read_message(body)
            if model or prompt:
                length = _estimate_tokens(prompt, characters_per_token)
                salt = _owner_salt(owner, model.encode())
                return PromptHashes(model, length, _mark_prefixes(prompt, salt, length), owner=owner)
        return PromptHashes()


def shrink_media(text: bytes) -> bytes:
    """Return a JSON text with digests in place of media: the data of data: URLs, and long values of certain members."""
    if len(text) <= MEDIA_SIZE:
        return text
    text = _replace_values(text, DATA_MARK, _end_of_data)
    for mark in MEDIA_VALUE_MARKS:
        text = _replace_values(text, mark, _end_of_value)
    return text


def _replace_values(text: bytes, mark: bytes, find_value: Callable[[bytes, int], tuple[int, int]]) -> bytes:
    """Replace the long values after a mark. ``find_value``: start and end of the value, given the end of the mark."""
    pieces, done, position = [], 0, text.find(mark)
    while position >= 0:
        start, end = find_value(text, position + len(mark))
        if end - start > MEDIA_SIZE:
            pieces += [text[done:start], _digest_text(text[start:end])]
            done = end
        position = text.find(mark, max(start, end))
    return b"".join((*pieces, text[done:])) if pieces else text


def _end_of_data(text: bytes, start: int) -> tuple[int, int]:
    """Return start and end of the data of a URL: it ends with its string, or with the Markdown link around it."""
    end = _find_or_end(text, b'"', start, len(text))
    return start, _find_or_end(text, b")", start, end)


def _end_of_value(text: bytes, position: int) -> tuple[int, int]:
    """Return start and end of the string that is the value of a member, given the end of the member's name."""
    match = VALUE_START.match(text, position)
    return (position, position) if match is None else (match.end(), _find_or_end(text, b'"', match.end(), len(text)))


def _find_or_end(text: bytes, mark: bytes, start: int, end: int) -> int:
    position = text.find(mark, start, end)
    return end if position < 0 else position


def _digest_text(value: bytes) -> bytes:
    """Return the digest of a long value as MEDIA_SIZE characters, or the value if it is short."""
    if len(value) <= MEDIA_SIZE:
        return value
    digest = hashlib.blake2b(value).hexdigest().encode()
    return digest * (MEDIA_SIZE // len(digest))


def _unique_names(several: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return all names once, in order of first occurrence."""
    return tuple(dict.fromkeys(name for names in several for name in names))


def _owner_salt(owner: str, salt: bytes) -> bytes:
    """Return the salt of an owner's hashes; the id of an owner has a fixed length."""
    return owner.encode() + b"\0" + salt if owner else salt


def _first_present(members: Iterable[bytes]) -> bytes:
    """Return the first member that is present and not null, or nothing."""
    return next((member for member in members if member not in (b"", b"null")), b"")


def _mark_prefixes(text: bytes, salt: bytes, length: int) -> list[PrefixMark]:
    """Return the marks of a text that has ``length`` tokens."""
    digest = hashlib.blake2b(salt, digest_size=6)
    marks, position, tokens_per_byte = [], 0, length / len(text) if text else 0.0
    view = memoryview(text)
    for mark in MARK_POSITIONS[: bisect_right(MARK_POSITIONS, len(text))]:
        digest.update(view[position:mark])
        marks.append(PrefixMark(int(mark * tokens_per_byte), int.from_bytes(digest.digest())))
        position = mark
    return marks


def _estimate_tokens(prompt: bytes, characters_per_token: float) -> int:
    if prompt[:1] == b"[" and prompt[1:].lstrip(b" [\r\n\t")[:1].isdigit():
        return prompt.count(b",") + 1  # token ids
    return max(1, int(len(prompt.decode("utf-8", "replace")) / characters_per_token)) if prompt else 0


def _estimate_scored(
    prompt: bytes, scored_lists: Sequence[bytes], preceding: Sequence[bytes], characters_per_token: float
) -> int:
    """Return the tokens that texts which are each computed with a prompt, or with one of several, add to the prompt's
    own. Those among the ``preceding`` texts are counted already."""
    added = 0
    for texts in scored_lists:
        text_count, prompt_count = _count_elements(texts), _count_elements(prompt)
        added += (max(1, text_count // prompt_count) - 1) * _estimate_tokens(prompt, characters_per_token)
        if texts not in preceding:
            added += _estimate_tokens(texts, characters_per_token)
    return added


def _count_elements(text: bytes) -> int:
    """Return the number of elements of a JSON array; 1 for anything else."""
    try:
        return max(1, len(_LIST_DECODER.decode(text)))
    except msgspec.MsgspecError:
        return 1


def _decode_name(raw: bytes) -> str:
    try:
        return _TEXT_DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


hash_prompt = PromptReader(mount.dialect for mount in (*API_MOUNTS, *INNER_MOUNTS)).hash_body


class RecentPrefixes:
    """Hashes of recently computed prompts, up to ``capacity`` tokens (the size of the cache); the oldest are forgotten.

    It follows the requests and does not look into the cache. A reported prefix may therefore have been evicted, which
    costs only its recomputation.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._tokens_by_hash: OrderedDict[int, int] = OrderedDict()  # tokens between a mark and the mark before it
        self._token_total = 0

    def add_prompt(self, marks: Sequence[PrefixMark]) -> None:
        """Record a computed prompt. Its beginning counts as newer than its end, as other prompts may share it."""
        befores = [0, *(mark.tokens for mark in marks)]
        for mark, before in zip(reversed(marks), reversed(befores[:-1]), strict=True):
            self._token_total += mark.tokens - before - self._tokens_by_hash.pop(mark.prefix_hash, 0)
            self._tokens_by_hash[mark.prefix_hash] = mark.tokens - before
        while self._tokens_by_hash and self._token_total > self._capacity:
            self._token_total -= self._tokens_by_hash.popitem(last=False)[1]

    def newest_hashes(self, limit: int = MAX_REPORTED_HASHES) -> list[int]:
        """Return the newest hashes, newest first, for ``prefix_hash`` of /v1/status."""
        newest = reversed(self._tokens_by_hash)
        return [prefix_hash for prefix_hash, _ in zip(newest, range(limit), strict=False)]
