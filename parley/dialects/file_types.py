"""The media types of files by the extensions of their names, and which of these types are texts."""

from __future__ import annotations

import mimetypes
from pathlib import PurePosixPath

# The extensions of each type. Python knows some only where the host has a table, and gives others a type that is
# not text: that of a video for .ts. OpenAI lists these as texts:
# https://developers.openai.com/api/docs/guides/file-inputs
_EXTENSIONS = {
    "application/json": ".json .ipynb",
    "application/json5": ".json5",
    "application/toml": ".toml",
    "application/x-ndjson": ".jsonl .ndjson",
    "application/x-powershell": ".ps1",
    "audio/flac": ".flac",
    "audio/mp4": ".m4a",
    "audio/ogg": ".ogg",
    "image/webp": ".webp",
    "message/rfc822": ".eml .mht .mhtml .mime .nws",
    "text/calendar": ".ics .ifb",
    "text/css": ".css",
    "text/csv": ".csv",
    "text/html": ".html .htm .vue .svelte",
    "text/javascript": ".js .mjs .cjs",
    "text/jsx": ".jsx",
    "text/markdown": ".md .markdown",
    "text/plain": ".txt .text .log .list .in .def .dic .conf .cfg .ini .env .properties .bat .srt",
    "text/tab-separated-values": ".tsv",
    "text/tsx": ".tsx",
    "text/vtt": ".vtt",
    "text/x-asm": ".asm .s",
    "text/x-c": ".c .h",
    "text/x-c++": ".cc .cpp .cxx .hh .hpp",
    "text/x-clojure": ".clj",
    "text/x-csharp": ".cs",
    "text/x-dart": ".dart",
    "text/x-diff": ".diff .patch",
    "text/x-elixir": ".ex .exs",
    "text/x-erlang": ".erl",
    "text/x-go": ".go",
    "text/x-graphql": ".graphql",
    "text/x-groovy": ".groovy .gradle",
    "text/x-haskell": ".hs",
    "text/x-hcl": ".hcl .tf",
    "text/x-iif": ".iif",
    "text/x-java": ".java",
    "text/x-julia": ".jl",
    "text/x-kotlin": ".kt",
    "text/x-lua": ".lua",
    "text/x-perl": ".pl",
    "text/x-php": ".php",
    "text/x-protobuf": ".proto",
    "text/x-python": ".py",
    "text/x-r": ".r",
    "text/x-rst": ".rst",
    "text/x-ruby": ".rb",
    "text/x-rust": ".rs",
    "text/x-scala": ".scala",
    "text/x-sh": ".sh .ksh .bash .zsh",
    "text/x-sql": ".sql",
    "text/x-swift": ".swift",
    "text/x-tex": ".tex",
    "text/x-typescript": ".ts",
    "text/x-vcard": ".vcf",
    "text/xml": ".xml",
    "text/yaml": ".yaml .yml",
    "video/x-matroska": ".mkv",
}
COMMON_TYPES = {
    extension: media_type for media_type, extensions in _EXTENSIONS.items() for extension in extensions.split()
}
TEXT_TYPES = frozenset(  # besides those of text/
    ("application/csv", "application/graphql", "application/javascript", "application/json", "application/json5",
     "application/sql", "application/toml", "application/typescript", "application/x-awk", "application/x-bash",
     "application/x-graphql", "application/x-httpd-php", "application/x-httpd-php-source", "application/x-iif",
     "application/x-json5", "application/x-ndjson", "application/x-patch", "application/x-php",
     "application/x-powershell", "application/x-protobuf", "application/x-rust", "application/x-scala",
     "application/x-sh", "application/x-sql", "application/x-subrip", "application/x-terraform", "application/x-toml",
     "application/x-yaml", "application/xml", "application/yaml", "message/rfc822")
)  # fmt: skip
TEXT_SUFFIXES = ("+json", "+xml", "+yaml")


def guess_media_type(filename: str) -> str:
    """Return the media type of a file by the extension of its name; "" if the extension says none."""
    return COMMON_TYPES.get(PurePosixPath(filename).suffix.lower()) or mimetypes.guess_type(filename)[0] or ""


def is_text_type(media_type: str) -> bool:
    """Whether files of a media type are texts for the model."""
    name = media_type.partition(";")[0].strip().lower()
    is_image = name.startswith("image/")  # image/svg+xml
    return name.startswith("text/") or name in TEXT_TYPES or (name.endswith(TEXT_SUFFIXES) and not is_image)
