"""Images, videos and audio in MindIE's prompts: how a value is understood, and the sentences of refusals.

A value is a URL, a path below a folder of the server, a data: URL, or an image in base64, tried in this order. URLs
and paths are recognized by their extension, as the original does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parley.dialects import media
from parley.dialects.fields import Fields
from parley.errors import BadMedia, BadRequest, MediaFault, Unsupported
from parley.types import EncodedMedia, Media, MediaKind, MediaPath, MediaSource

URL_KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
PART_NAMES: dict[str, str] = {kind: name for name, kind in URL_KINDS.items()}
EXTENSIONS: dict[MediaKind, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png"),
    "video": (".mp4", ".avi", ".wmv"),
    "audio": (".mp3", ".wav", ".flac"),
}
MAX_EXTENSION = 5  # characters of the longest of them
AUDIO_FORMATS = ["mp3", "wav", "flac"]
DATA_URL = re.compile(
    r"data:((?:image|video|audio)/(?:jpeg|png|mp4|x-msvideo|x-ms-wmv|mpeg|x-wav|flac));base64,", re.ASCII
)
PATH_PATTERN = re.compile(r"[\w\-./]+", re.ASCII)
SIGNATURE = "signature="  # in the query of a signed URL of an object store, in small letters
MEDIA_FOLDER = "/data/multimodal_inputs/"
TOTAL_LIMIT_MB = 1000.0

SENTENCE_PREFIX = "[InferTokenizer::DownloadUrl] Download fail: ValueError: "
WRONG_EXTENSION = "The media type is {}, url must end with one of {}."
TOO_LONG_URL = f"The length of media_url should be less than {media.MAX_URL_LENGTH}, but got {{}}."
DANGEROUS_PATH = "The media url contains dangerous characters, only allow a-zA-Z0-9_-."
WRONG_INPUT_AUDIO = (
    f"'input_audio.data' should be base64 encoded data, and the 'input_audio.format' should be in {AUDIO_FORMATS}."
)
SENTENCES: dict[MediaFault, str] = {
    "bad_data_url": "Expected format: data:<mime_type>/<subtype>;base64,<base64_data>",
    "bad_base64": "Invalid base64 url",
    "not_found": "Can not find the input media file.",
    "unreachable": "The media url can not be downloaded.",
    "unknown_format": "The format of the {} is not supported.",
    "undecodable": "The {} can not be decoded.",
    "too_slow": "The {} can not be decoded in time.",
    "refused_by_model": "The {} is not accepted by the model.",
    "too_many_pixels": "The {} has too many pixels.",
    "too_long": "The {} is too long.",
}
FOREIGN_PATH = (
    "Your input local file path is not allowed!please ensure your multimedia files are placed under " + MEDIA_FOLDER
)
FOREIGN_HOST = "The domain of the media url is not in ALLOWED_MEDIA_DOMAINS_ENV."
TOO_LARGE = "The size of {} exceeds the limit of {:.2f} MB."
TOO_LARGE_TOGETHER = f"The total media input cannot exceed {TOTAL_LIMIT_MB} MB."


@dataclass(frozen=True, slots=True)
class MediaPartReader:
    """Reads the items of the list in ``member``. ``limits``: as in RequestContext."""

    body: Fields
    member: str
    limits: Mapping[MediaKind, int]

    def read_item(self, number: int, part: dict[str, Any], part_type: str) -> Media:
        """Return the item of the list's part ``number``. Raises BadRequest."""
        value = part.get(part_type)
        if part_type in URL_KINDS and isinstance(value, dict):
            value = value.get("url")
        if value is None:
            raise self.body.member_error(self.member, f"Request param {part_type} null")
        kind = URL_KINDS.get(part_type, "audio")
        if kind not in self.limits:
            raise Unsupported(f"Request param {part_type} is not available on this server", field=self.member)
        if part_type not in URL_KINDS:
            source: MediaSource = self._read_input_audio(value)
        elif isinstance(value, str):
            source = self._read_value(value, part_type)
        else:
            raise self._download_error(f"Input of {part_type} should be str or dict.")
        return Media(kind, source, f"{self.body.member_path(self.member)}[{number}].{part_type}")

    def _read_value(self, value: str, part_type: str) -> MediaSource:
        """Understand a value as a URL, a path, a data: URL, or the base64 of an image, in this order."""
        kind = URL_KINDS[part_type]
        extensions = EXTENSIONS[kind]
        wrong_extension = self._download_error(WRONG_EXTENSION.format(part_type, list(extensions)))
        if value.startswith(("http://", "https://")):
            address = media.read_address(value, kind, self.body.member_path(self.member))
            if not _names_file(value, extensions):
                raise wrong_extension
            return address
        if value[-MAX_EXTENSION:].lower().endswith(extensions):
            path = value.removeprefix("file://")
            if not PATH_PATTERN.fullmatch(path):
                raise self._download_error(DANGEROUS_PATH)
            return MediaPath(path)
        if value.startswith("data:"):
            header = DATA_URL.match(value)
            if header is None:
                raise self._download_error(SENTENCES["bad_data_url"])
            return EncodedMedia(value[header.end() :], header[1])
        if kind != "image":
            raise wrong_extension
        return EncodedMedia(value, "image/jpeg")

    def _read_input_audio(self, value: Any) -> EncodedMedia:
        data, audio_format = (value.get("data"), value.get("format")) if isinstance(value, dict) else (None, None)
        if not isinstance(data, str) or not data or audio_format not in AUDIO_FORMATS:
            raise self._download_error(WRONG_INPUT_AUDIO)
        return EncodedMedia(data, f"audio/{audio_format}")

    def _download_error(self, sentence: str) -> BadRequest:
        return self.body.member_error(self.member, SENTENCE_PREFIX + sentence)


def mindie_media_sentence(error: BadMedia) -> str:
    """Return the sentence of an error about an item."""
    return SENTENCE_PREFIX + _fault_sentence(error)


def _fault_sentence(error: BadMedia) -> str:
    name, detail = PART_NAMES.get(error.kind, error.kind), error.detail
    match error.reason:
        case "too_many":
            return f"The number of multimodal url should be no more than {detail.get('limit', 0)}"
        case "bad_address" if "size" in detail:
            return TOO_LONG_URL.format(detail["size"])
        case "bad_address":
            return "The media url is not valid."
        case "forbidden_address":
            return FOREIGN_HOST if "host" in detail else FOREIGN_PATH
        case "too_large" if "total" in detail:
            return TOO_LARGE_TOGETHER
        case "too_large":
            return TOO_LARGE.format(name, float(detail.get("limit", 0)) / (1 << 20))
    return SENTENCES[error.reason].format(name) if error.reason in SENTENCES else error.message


def _names_file(url: str, extensions: tuple[str, ...]) -> bool:
    """Whether a URL ends in an extension; in a signed one, the path before the query ends in it."""
    path, _, query = url.lower().partition("?")
    return url.lower().endswith(extensions) or (SIGNATURE in query and path.endswith(extensions))
