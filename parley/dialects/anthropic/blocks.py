"""Content blocks of a request: texts, images, documents and results of tools, read into texts and media.

The blocks that only an assistant's turn has (thinking, calls) are in ``turns.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from parley.dialects import media
from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.browser_state import read_browser_state
from parley.dialects.anthropic.file_sources import with_file_content
from parley.dialects.anthropic.refusal_wording import anthropic_value_error, check_anthropic_members, dotted_path
from parley.dialects.fields import Fields
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, InvalidValue, Unsupported
from parley.types import EncodedMedia, Media, MediaAddress

MAX_BLOCKS = 100_000  # in one content
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
CacheTtl = Literal["5m", "1h"]
CACHE_TTLS: tuple[CacheTtl, ...] = get_args(CacheTtl)
TEXT_MEMBERS = {"type", "text", "cache_control", "citations"}
IMAGE_MEMBERS = {"type", "source", "cache_control", "transformations"}
DOCUMENT_MEMBERS = {"type", "source", "cache_control", "citations", "context", "title"}
RESULT_MEMBERS = {"type", "source", "title", "content", "cache_control", "citations"}
REFERENCE_MEMBERS = {"type", "tool_name", "cache_control"}
# Blocks of hosted tools, from a conversation that began at the original.
HOSTED_BLOCKS = frozenset({
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "mcp_tool_use", "mcp_tool_result", "container_upload", "advisor_tool_result", "fallback",
})  # fmt: skip
SHARED_BLOCKS = ("text", "image", "document", "search_result")
SOURCE_TYPES = {"image": ("base64", "url", "file"), "document": ("text", "content", "base64", "url", "file")}
DOCUMENT_BLOCKS = ("text", "image")  # in a document; with documents among them, a body could nest them without end

Parts = list[str | Media]


class BlockReader:
    """Reads the blocks of one request. ``cache_ttl``: that of the last ``cache_control`` read, None if there was none.

    ``revealed_tools``: the names of deferred tools that the conversation refers to.
    """

    def __init__(self, context: RequestContext, rules: AnthropicRules):
        self.rules = rules
        self.cache_ttl: CacheTtl | None = None
        self.revealed_tools: set[str] = set()
        self._context = context
        self._media_limits = context.media_limits

    def read_parts(self, item: Fields, name: str, *, in_result: bool = False) -> Parts:
        """Return the texts and items of a content: a string, or blocks that any turn may have. Raises BadRequest."""
        if isinstance(item.raw_value(name), str):
            return [item.string(name, "")]
        return [part for block in item.objects(name, cap=MAX_BLOCKS) for part in self.read_block(block, in_result)]

    def read_block(self, block: Fields, in_result: bool = False) -> Iterator[str | Media]:
        """Yield the texts and items of a block. Raises BadRequest."""
        block_type = self.read_block_type(block)
        self.read_cache_control(block)
        match block_type:
            case "text":
                yield self.read_text(block)
            case "image":
                yield self._read_image(block)
            case "document":
                yield from self._read_document(block)
            case "search_result":
                yield self._read_search_result(block)
            case "tool_reference" if in_result:
                yield self._read_tool_reference(block)
            case "browser_state" if in_result:
                yield read_browser_state(block, self.rules)
            case _ if block_type in HOSTED_BLOCKS:
                yield from self.read_hosted_block(block, block_type)
            case _:
                raise block.member_error(
                    "type", f"Input tag '{block_type[:60]}' does not match any of the expected tags"
                )

    def read_block_type(self, block: Fields) -> str:
        """Return the type of a block. Raises MissingField."""
        block_type = block.string("type", None, cap=256)
        if block_type is None:
            raise block.missing_member("type")
        return block_type

    def read_text(self, block: Fields) -> str:
        """Return the text of a text block. Raises BadRequest."""
        check_anthropic_members(block, TEXT_MEMBERS, self.rules, "text")
        text = block.string("text", None)
        if text is None:
            raise block.missing_member("text")
        self.check_text(text, block.member_path("text"))
        return text

    def check_text(self, text: str, path: str) -> None:
        """Raise InvalidValue for a text without characters, where strict. ``path``: of the text in the body."""
        if self.rules.strict and not text:
            raise InvalidValue("messages: text content blocks must be non-empty", field=path)

    def read_cache_control(self, fields: Fields) -> None:
        """Check a ``cache_control``. Every prefix is cached anyway, so it only changes the usage. Raises BadRequest."""
        control = fields.object("cache_control")
        if control is None:
            return
        check_anthropic_members(control, {"type", "ttl", "scope"}, self.rules)
        if control.string("type", None, allowed=("ephemeral",)) is None:
            raise control.missing_member("type")
        self.cache_ttl = "1h" if control.string("ttl", "5m", allowed=CACHE_TTLS) == "1h" else "5m"

    def read_hosted_block(self, block: Fields, block_type: str) -> Iterator[str]:
        """Yield the texts within a block that a hosted tool left; its other members mean nothing here."""
        if self.rules.strict:
            raise anthropic_value_error(block, "type", block_type)
        if not isinstance(block.raw_value("content"), list):
            return
        for value in block.array("content", cap=MAX_BLOCKS):
            if isinstance(value, dict) and isinstance(text := value.get("text"), str):
                yield text

    def _read_image(self, block: Fields) -> Media:
        check_anthropic_members(block, IMAGE_MEMBERS, self.rules, "image")
        if "image" not in self._media_limits:
            path = block.member_path("type")
            readable = media.name_readable_kinds(self._media_limits)
            sentence = f"{dotted_path(path)}: this model reads {readable} only, but got 'image'"
            raise Unsupported(sentence, field=path, code="unsupported_value")
        source = self._read_source(block, "image")
        match source.raw_value("type"):
            case "base64":
                return self._image(block, _read_base64_image(source))
            case "url":
                url = source.string("url", None)
                if url is None:
                    raise source.missing_member("url")
                return self._image(block, _read_image_url(url, dotted_path(source.member_path("url"))))
        raise source.missing_member("type")

    def _image(self, block: Fields, source: EncodedMedia | MediaAddress) -> Media:
        return Media("image", source, dotted_path(block.member_path("source")))

    def _read_document(self, block: Fields) -> Parts:
        """Return a document that is text, with its title and context before it. Raises BadRequest."""
        check_anthropic_members(block, DOCUMENT_MEMBERS, self.rules, "document")
        self._check_citations(block)
        heading = [block.string(name, None) for name in ("title", "context")]
        source = self._read_source(block, "document")
        match source.raw_value("type"):
            case "text":
                source.string("media_type", "text/plain", allowed=("text/plain",))
                data = source.string("data", None)
                if data is None:
                    raise source.missing_member("data")
                parts: Parts = [data]
            case "content":
                if not source.has_value("content"):
                    raise source.missing_member("content")
                parts = self._read_document_content(source)
            case None:
                raise source.missing_member("type")
            case source_type:
                raise anthropic_value_error(source, "type", source_type)
        return [*filter(None, heading), *parts]

    def _read_document_content(self, source: Fields) -> Parts:
        if not isinstance(source.raw_value("content"), str):
            for block in source.objects("content", cap=MAX_BLOCKS):
                block.string("type", None, allowed=DOCUMENT_BLOCKS)
        return self.read_parts(source, "content")

    def _read_search_result(self, block: Fields) -> str:
        check_anthropic_members(block, RESULT_MEMBERS, self.rules, "search_result")
        self._check_citations(block)
        lines = []
        for name in ("title", "source"):
            line = block.string(name, None)
            if line is None:
                raise block.missing_member(name)
            lines.append(line)
        texts = [self.read_text(part) for part in block.objects("content", cap=MAX_BLOCKS)]
        return "\n".join([*lines, *texts])

    def _read_tool_reference(self, block: Fields) -> str:
        check_anthropic_members(block, REFERENCE_MEMBERS, self.rules, "tool_reference")
        name = block.string("tool_name", None, cap=256)
        if name is None:
            raise block.missing_member("tool_name")
        self.revealed_tools.add(name)
        return name

    def _read_source(self, block: Fields, block_type: str) -> Fields:
        """Return the source of a block; one that names a file, with the file's content. Raises BadRequest."""
        source = block.object("source")
        if source is None:
            raise block.missing_member("source")
        source_type = source.string("type", None, allowed=SOURCE_TYPES[block_type])
        return with_file_content(source, block_type, self._context) if source_type == "file" else source

    def _check_citations(self, block: Fields) -> None:
        """Refuse citations, which no answer has, if the rules are strict. Raises Unsupported."""
        citations = block.object("citations")
        if citations is not None and citations.boolean("enabled", False) and self.rules.strict:
            path = citations.member_path("enabled")
            raise Unsupported(f"{dotted_path(path)}: citations are not supported by this server", field=path)


def _read_base64_image(source: Fields) -> EncodedMedia:
    media_type = source.string("media_type", None, allowed=IMAGE_TYPES)
    data = source.string("data", None)
    for name, value in (("media_type", media_type), ("data", data)):
        if value is None:
            raise source.missing_member(name)
    if not data:
        path = dotted_path(source.member_path("data"))
        raise BadMedia(f"{path}: the image must not be empty", reason="bad_base64", kind="image", field=path)
    return EncodedMedia(data, media_type or "")


def _read_image_url(url: str, path: str) -> EncodedMedia | MediaAddress:
    """Return the source that a URL names. Raises BadMedia for a path on the server's disk."""
    source = media.read_media_url(url, "image", path, files=False)
    assert isinstance(source, EncodedMedia | MediaAddress)
    return source
