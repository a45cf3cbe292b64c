"""The parts of a message that hold images, video and audio.

OpenAI's are ``image_url``, ``input_audio`` and ``file``. vLLM's server added ``audio_url``, ``video_url``,
``input_image``, parts without a type, embeddings that the client computed, and items that it names by ``uuid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from parley.dialects import media
from parley.dialects.error_wording import json_type
from parley.dialects.fields import Fields
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.reading_rules import ReadingRules, applied_options
from parley.dialects.openai.uploaded_files import with_uploaded_file
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, BadRequest, InvalidValue, ParleyError
from parley.types import (
    MEDIA_KINDS,
    CachedMedia,
    EncodedMedia,
    ImageDetail,
    Media,
    MediaEmbeddings,
    MediaKind,
    MediaSource,
)

URL_PARTS: dict[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
}
EMBEDDING_PARTS: dict[str, MediaKind] = {f"{kind}_embeds": kind for kind in MEDIA_KINDS}
MEDIA_PART_TYPES = ("image_url", "input_audio", "file", "input_image", "video_url", "audio_url", *EMBEDDING_PARTS)
TYPELESS_PARTS = ("image_url", "audio_url", "video_url", "input_audio")  # read without a type, in this order
DETAILS = ("auto", "low", "high", "original")
AUDIO_FORMATS = ("wav", "mp3")
# Subjects of OpenAI's sentence about a message whose role may not have media.
ROLE_SUBJECTS: dict[MediaKind, str] = {"image": "Image URLs", "video": "Videos", "audio": "Input audio parts"}
ROLE_SENTENCE = (
    "Invalid '{path}'. {subject} are only allowed for messages with role {allowed}, but this message with role "
    "'{role}' contains one."
)
EMBEDDINGS_SENTENCE = "You must set `--enable-mm-embeds` to input `{name}`"


@dataclass(frozen=True, slots=True)
class MediaMembers:
    """The members of a request for all its media: how they are loaded, by kind, and options for the processor."""

    loading: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


class MediaReader:
    """Reads the media of a request's messages.

    * ``limits``: the number of items that the request may have, by the kinds that the model reads.
    * ``roles``: those whose messages may have media; empty: all.
    * ``plain_urls``: a URL may stand where its object is due.
    * ``typeless``: a part may have no type.
    * ``embeddings``: the operator takes embeddings from clients.
    * ``limited_by``: the part of the server that reads text only, for errors; used if there are no limits.
    * ``uploads``: the client's uploaded files, if parts may name them.
    """

    part_types: tuple[str, ...] = MEDIA_PART_TYPES

    def __init__(
        self,
        limits: Mapping[MediaKind, int],
        *,
        roles: tuple[str, ...] = (),
        plain_urls: bool = True,
        typeless: bool = False,
        embeddings: bool = False,
        members: MediaMembers | None = None,
        limited_by: str = "this model",
        uploads: RequestContext | None = None,
    ):
        self.limits = limits
        self.limited_by = limited_by
        self._roles, self._plain_urls, self._typeless, self._embeddings = roles, plain_urls, typeless, embeddings
        self._members = members or MediaMembers()
        self._uploads = uploads

    def read_part(self, part: Fields, role: str, text_types: tuple[str, ...]) -> Media | None:
        """Return the item of a part of a message, or None for a text. Raises BadRequest.

        ``text_types``: the types of parts with text that are accepted as well.
        """
        part_type = part.string("type", None, allowed=(*text_types, *self.part_types))
        is_typeless = part_type is None
        if is_typeless and self._typeless:
            part_type = next((name for name in TYPELESS_PARTS if part.has_value(name)), None)
        if part_type not in self.part_types:
            return None
        item = self.read_item(part, part_type, plain_urls=self._plain_urls or is_typeless)
        if self._roles and role not in self._roles:
            raise self._role_error(part, role, item.kind)
        return item

    def unread_kind(self, part: Fields, part_type: str, kind: MediaKind) -> ParleyError:
        """Return the refusal of a kind that the model does not read."""
        path = part.member_path("type")
        message = f"'{path}' is '{part_type}', but this model reads {media.name_readable_kinds(self.limits)} only."
        error = BadMedia(message, reason="too_many", kind=kind, field=path, limit=0)
        error.code = "unsupported_value"
        return error

    def read_item(self, part: Fields, part_type: str, *, plain_urls: bool) -> Media:
        """Return the item of a part of this type. Raises BadRequest."""
        if part_type == "file":
            return self._read_file(part)
        kind = "audio" if part_type == "input_audio" else (URL_PARTS | EMBEDDING_PARTS)[part_type]
        self.check_kind(part, part_type, kind)
        uuid = part.string("uuid", None, cap=media.MAX_UUID) or None
        member = "image_url" if part_type == "input_image" else part_type
        if part_type in EMBEDDING_PARTS and not part.has_value(part_type) and part.has_value("data"):
            member = "data"
        if uuid is not None and not part.raw_value(member):
            return self._media(part, member, kind, CachedMedia(), uuid=uuid)
        if not part.has_value(member):
            raise part.missing_member(member)
        if part_type in EMBEDDING_PARTS:
            return self._media(part, member, kind, self._read_embeddings(part, part_type, member), uuid=uuid)
        if part_type == "input_audio":
            return self._media(part, member, kind, _read_input_audio(part), uuid=uuid)
        return self._read_url_part(part, member, kind, uuid, plain=plain_urls or part_type == "input_image")

    def check_kind(self, part: Fields, part_type: str, kind: MediaKind) -> None:
        """Raise the refusal of a kind that the model does not read."""
        if kind not in self.limits:
            raise self.unread_kind(part, part_type, kind)

    def _read_url_part(self, part: Fields, member: str, kind: MediaKind, uuid: str | None, *, plain: bool) -> Media:
        options = None if plain and isinstance(part.raw_value(member), str) else part.object(member)
        url = part.string(member, "") if options is None else options.string("url", "")
        if options is not None and not url and uuid is None:
            raise options.missing_member("url")
        detail = (options or part).string("detail", "auto", allowed=DETAILS) if kind == "image" else "auto"
        path = part.member_path(member)
        source: MediaSource = CachedMedia() if uuid and not url else media.read_media_url(url, kind, path)
        return self._media(part, member, kind, source, uuid=uuid, detail=cast(ImageDetail, detail))

    def _read_embeddings(self, part: Fields, part_type: str, member: str) -> MediaEmbeddings:
        if not self._embeddings:
            raise InvalidValue(EMBEDDINGS_SENTENCE.format(name=part_type), field=part.member_path(member))
        return MediaEmbeddings(part.string(member, ""))

    def _read_file(self, part: Fields) -> Media:
        """Read a file in the body, or one that the client has uploaded."""
        file_object = part.object("file")
        if file_object is None:
            raise part.missing_member("file")
        if file_object.has_value("file_id"):
            if self._uploads is None:
                raise unsupported_member_error(file_object, "file_id", "Uploaded files are")
            file_object = with_uploaded_file(file_object, "file_data", self._uploads)
        file_object.string("filename", None)
        url = file_object.string("file_data", None)
        if url is None:
            raise file_object.missing_member("file_data")
        source = media.read_data_url(url, "image", file_object.member_path("file_data"))
        kind = _kind_of_type(source.media_type)
        if kind is None:
            raise file_object.member_error("file_data", "the file must be an image, a video or audio.")
        self.check_kind(part, "file", kind)
        return self._media(part, "file", kind, source)

    def _media(
        self,
        part: Fields,
        member: str,
        kind: MediaKind,
        source: MediaSource,
        *,
        uuid: str | None = None,
        detail: ImageDetail = "auto",
    ) -> Media:
        loading = self._members.loading.get(kind, {})
        return Media(kind, source, part.member_path(member), detail, uuid, loading, self._members.processor)

    def _role_error(self, part: Fields, role: str, kind: MediaKind) -> BadRequest:
        path = part.member_path("type").partition(".")[0]
        allowed = " or ".join(f"'{name}'" for name in self._roles)
        sentence = ROLE_SENTENCE.format(path=path, subject=ROLE_SUBJECTS[kind], allowed=allowed, role=role)
        return InvalidValue(sentence, field=path)


TEXT_ONLY = MediaReader({})
TEXT_ROUTE = MediaReader({}, limited_by="this route")  # whatever the model reads


def media_reader(body: Fields, rules: ReadingRules, context: RequestContext) -> MediaReader:
    """Return the reader of a request's media. Raises BadRequest for wrong options of media."""
    if not context.media_limits:
        return TEXT_ONLY
    options = applied_options(context, rules)
    return MediaReader(
        context.media_limits,
        roles=rules.media_roles,
        plain_urls=rules.plain_urls,
        typeless=rules.lenient_messages,
        embeddings=options.enable_mm_embeds,
        members=_read_media_members(body) if options.trust_request_mm_kwargs else None,
        uploads=context if context.records.are_kept else None,
    )


def _read_media_members(body: Fields) -> MediaMembers:
    """Read vLLM's members for loading and processing. Whether the values suit the model is checked with each item."""
    loading = body.free_object("media_io_kwargs")
    for kind, options in loading.items():
        if kind not in MEDIA_KINDS:
            raise body.member_error("media_io_kwargs", f"its members are {', '.join(MEDIA_KINDS)}.")
        if not isinstance(options, dict):
            raise body.member_error("media_io_kwargs", f"'{kind}' must be an object, but it is {json_type(options)}.")
    return MediaMembers(loading, body.free_object("mm_processor_kwargs"))


def _read_input_audio(part: Fields) -> EncodedMedia:
    """Read a clip in base64 with its format."""
    audio = part.object("input_audio")
    assert audio is not None
    data = audio.string("data", None)
    if data is None:
        raise audio.missing_member("data")
    audio_format = audio.string("format", None, allowed=AUDIO_FORMATS)
    if audio_format is None:
        raise audio.missing_member("format")
    if not data:
        message = f"Invalid '{audio.member_path('data')}': it must not be empty."
        raise BadMedia(message, reason="bad_base64", kind="audio", field=part.member_path("input_audio"))
    return EncodedMedia(data, f"audio/{audio_format}")


def _kind_of_type(media_type: str) -> MediaKind | None:
    """Return the kind of a media type such as "image/png", or None."""
    main = media_type.partition("/")[0]
    return main if main in MEDIA_KINDS else None
