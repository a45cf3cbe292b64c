"""Makes a model folder with another config, tokenizer or chat template, from links to the old files and new files.

So all other code that reads models reads one folder, and knows no overrides. A tokenizer in another format is converted
to tokenizer.json. The folder is in the user's cache, under a name that depends on the files and on the overrides; it is
written once and never changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parley.cache_folders import remove_scratch_folders, user_cache_folder, write_whole_folder
from parley.hub.byte_level import convert_byte_level
from parley.hub.sentence_piece import BadTokenizerModel, convert_sentence_piece
from parley.hub.tekken import convert_tekken
from parley.types import ModelOverrides

CONTENT_VERSION = 2  # is increased when this module writes other files for the same folder and overrides
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZER_FILES = frozenset(
    ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
     "vocab.json", "vocab.txt", "merges.txt", "tekken.json", *TEMPLATE_FILES)
)  # fmt: skip
TEMPLATE_MARKS = re.compile(r"[{}\n]")  # no path of a template has these
MAX_TEMPLATE_BYTES = 1 << 20


class UnusableOverride(Exception):
    """The overrides do not fit the folder, or it cannot be written. The message is a clause."""


def derive_folder(folder: Path, overrides: ModelOverrides, tokenizer: Path | None = None) -> Path:
    """Return a folder like ``folder``, which has a config.json, with the overrides; itself if nothing changes.

    ``tokenizer``: the folder with the tokenizer to use, if not its own. Raises UnusableOverride.
    """
    try:
        links = _visible_entries(folder)
        if tokenizer is not None:
            links = {name: path for name, path in links.items() if name not in TOKENIZER_FILES}
            links |= {name: path for name, path in _visible_entries(tokenizer).items() if name in TOKENIZER_FILES}
        contents: dict[str, str] = {}
        if overrides.chat_template:
            links = {name: path for name, path in links.items() if name not in TEMPLATE_FILES}
            contents["chat_template.jinja"] = _read_template(overrides.chat_template)
        if overrides.hf_overrides:
            contents["config.json"] = json.dumps(_merged_config(folder, overrides.hf_overrides))
        source = None if "tokenizer.json" in links else next(filter(links.__contains__, TOKENIZER_SOURCES), None)
        if tokenizer is None and not contents and source is None:
            return folder
        return _write_once(folder.name, links, contents, source)
    except BadTokenizerModel as error:
        raise UnusableOverride(str(error)) from None
    except OSError as error:
        raise UnusableOverride(
            f"its folder in the cache cannot be written: {error.strerror or error}; set XDG_CACHE_HOME"
        ) from None


def _visible_entries(folder: Path) -> dict[str, Path]:
    """Return files and folders by name. Hidden ones are caches of programs."""
    return {path.name: path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def _read_template(template: str) -> str:
    """Return the template that the option means: a file's content, or the text itself. Raises UnusableOverride."""
    if TEMPLATE_MARKS.search(template):
        return template
    path = Path(os.path.expanduser(template))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise UnusableOverride(f"the chat template {template} has more than {MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise UnusableOverride(f"the chat template {template} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnusableOverride(f"the chat template {template} is not UTF-8") from None


def _merged_config(folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (ValueError, RecursionError):
        raise UnusableOverride("its config.json is not valid JSON") from None
    if not isinstance(config, dict):
        raise UnusableOverride("its config.json does not hold a JSON object")
    return _merge_objects(config, overrides)


def _merge_objects(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the members of ``overrides``; objects in both are merged."""
    merged = dict(base)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = _merge_objects(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read_object(links: dict[str, Path], name: str) -> dict[str, Any]:
    """Return the JSON object in one of the files, empty without it. Raises OSError, BadTokenizerModel."""
    try:
        value = json.loads(links[name].read_text("utf-8")) if name in links else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadTokenizerModel(f"its {name} does not hold a JSON object")
    return value


def _read_more_tokens(links: dict[str, Path]) -> dict[str, int]:
    """Return the ids of the tokens in added_tokens.json."""
    return {token: number for token, number in _read_object(links, "added_tokens.json").items() if type(number) is int}


def _convert_model_file(links: dict[str, Path]) -> dict[str, Any]:
    config = _read_object(links, "tokenizer_config.json")
    return convert_sentence_piece(links["tokenizer.model"], config, _read_more_tokens(links))


def _convert_vocabulary(links: dict[str, Path]) -> dict[str, Any]:
    if "vocab.json" not in links:
        raise BadTokenizerModel("its folder has merges.txt, but neither tokenizer.json nor vocab.json")
    # The newer file may list special tokens that only the older one names
    config = _read_object(links, "special_tokens_map.json") | _read_object(links, "tokenizer_config.json")
    model_type = str(_read_object(links, "config.json").get("model_type"))
    return convert_byte_level(links["vocab.json"], links["merges.txt"], config, _read_more_tokens(links), model_type)


def _convert_tekken_file(links: dict[str, Path]) -> dict[str, Any]:
    converted = convert_tekken(links["tekken.json"])
    converted["tokenizer_config.json"] |= _read_object(links, "tokenizer_config.json")
    return converted


# Files that a tokenizer.json can be made of, and functions that return the contents of the files to write.
TOKENIZER_SOURCES: dict[str, Callable[[dict[str, Path]], dict[str, Any]]] = {
    "tekken.json": _convert_tekken_file,
    "tokenizer.model": _convert_model_file,
    "merges.txt": _convert_vocabulary,
}


def _write_once(name: str, links: dict[str, Path], contents: dict[str, str], source: str | None) -> Path:
    """Return the folder of these links and contents, written as a whole if it is not there.

    ``source``: the file whose conversion it has as well. Raises OSError, BadTokenizerModel.
    """
    home = user_cache_folder() / "folders"
    remove_scratch_folders(home)
    links = {file_name: Path(os.path.realpath(path)) for file_name, path in links.items() if file_name not in contents}
    folder = home / f"{name[:100]}-{_folder_digest(links, contents, source)}"
    if folder.is_dir():
        return folder
    if source is not None:
        converted = TOKENIZER_SOURCES[source](links)
        contents = {
            file_name: json.dumps(value, ensure_ascii=False) for file_name, value in converted.items()
        } | contents
        links = {file_name: path for file_name, path in links.items() if file_name not in contents}
    with write_whole_folder(folder) as scratch:
        for file_name, path in links.items():
            (scratch / file_name).symlink_to(path)
        for file_name, text in contents.items():
            (scratch / file_name).write_text(text, encoding="utf-8")
    return folder


def _folder_digest(links: dict[str, Path], contents: dict[str, str], source: str | None) -> str:
    """Return a digest of the files, and of the sources of the tokenizer. Raises OSError."""
    digest = hashlib.sha256(str(CONTENT_VERSION).encode())
    for name, path in sorted(links.items()):
        digest.update(f"\0{name}\0{path}".encode())
        if source is not None and (name == source or name in TOKENIZER_FILES):
            stat = path.stat()
            digest.update(f"\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    for name, text in sorted(contents.items()):
        digest.update(f"\0{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()[:16]
