"""The routes that describe models: lists, details, the version; and those that change them, which are refused by name.

Every model is always loaded, and stays so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from parley.dialects.admin_requests import PullRequest
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.error_answers import ollama_error_answer, ollama_failure_line
from parley.dialects.ollama.go_encoding import JSON_TYPE, encode_go, go_answer, go_time
from parley.dialects.ollama.model_names import DEFAULT_TAG, match_known_name, read_ollama_model_name, tagged_name
from parley.dialects.ollama.refusal_wording import OllamaWording
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError, UnknownModel, Unsupported

# Clients compare it with the least version that they accept, so it is Ollama's, whose API this is.
OLLAMA_VERSION = "0.35.0"
NEVER = "2318-01-01T00:00:00.000000001Z"  # when a model is unloaded
ROOT_TEXT = b"Ollama is running"
NOT_PULLED = "this server does not pull models: start it with --pull, or with the model"
HUB_PREFIX = "hf.co/"
LINES_TYPE = "application/x-ndjson"
COPILOT_AGENT = b"GitHubCopilotChat"
ABILITY_NAMES = {"tools": "tools", "insert": "insert", "thinking": "thinking"}
DTYPE_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
QUANTIZED_LEVELS = {"int8": "Q8_0", "int4": "Q4_0"}
# Members of a model's config.json, by the name that GGUF files have for them after the architecture's.
CONFIG_MEMBERS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
}
PARAMETER_NAMES = {"repetition_penalty": "repeat_penalty"}
HIDDEN_PARAMETERS = ("max_new_tokens",)


def answer_root(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the text that clients recognize the server by."""
    return Answer(200, ROOT_TEXT, b"text/plain; charset=utf-8")


def write_ollama_version(version: str) -> bytes:
    """Return the version of Ollama that this API is like."""
    return encode_go({"version": OLLAMA_VERSION})


def write_tags(cards: Sequence[ModelCard]) -> bytes:
    """Return the list of models, newest first."""
    cards = sorted(cards, key=lambda card: -card.created)
    entries = []
    for card in cards:
        entry = _list_entry(card)
        entry["details"] |= _model_lengths(card)
        entries.append(entry | _model_capabilities(card))
    return encode_go({"models": entries})


def write_running(cards: Sequence[ModelCard]) -> bytes:
    """Return the list of loaded models: those that are ready."""
    entries = []
    for card in cards:
        if card.phase == "ready":
            entry = _list_entry(card)
            del entry["modified_at"]
            size = entry["size"] if card.info is not None and card.info.device != "cpu" else 0
            more = {"expires_at": NEVER, "size_vram": size, "context_length": card.max_model_len or 0}
            entries.append(entry | more)
    return encode_go({"models": entries})


def answer_show(rules: OllamaRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Describe one model. Raises BadRequest, UnknownModel."""
    fields = decode_fields(body, OllamaWording("ShowRequest"))
    name, card = _find_card(fields, facts)
    fields.boolean("verbose", False)  # tensors and vocabularies are never listed
    parameters, template = _parameter_lines(card.sampling_defaults), _template_stand_in(card)
    answer: dict[str, Any] = {"license": card.license} if card.license else {}
    answer["modelfile"] = _write_modelfile(card, template, parameters)
    if parameters:
        answer["parameters"] = parameters
    answer["template"] = template
    answer["details"] = _details_object(card)
    answer["model_info"] = _model_info(card, _shown_name(name, card, context.headers))
    return go_answer(answer | _model_capabilities(card) | {"modified_at": go_time(card.created)})


class _ShownName(msgspec.Struct):
    model: str = ""
    name: str = ""


def read_shown_name(body: bytes) -> str:
    """Return the name of the model that a body asks about, "" if it has none or is malformed."""
    try:
        members = msgspec.json.decode(body, type=_ShownName)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return members.model or members.name


def read_pull(body: bytes, context: RequestContext, facts: ServerFacts) -> PullRequest | Answer:
    """Read a request to download a model; one that is served has nothing to download. Raises BadRequest."""
    fields = decode_fields(body, OllamaWording("PullRequest"))
    fields.boolean("insecure", False)
    stream = fields.boolean("stream", True)
    success_line = _pull_line("success")
    try:
        _find_card(fields, facts)
    except UnknownModel as error:
        refusal = go_answer({"error": NOT_PULLED}, 500)
        hub_name = error.name.removesuffix(DEFAULT_TAG).removeprefix(HUB_PREFIX)
        return PullRequest(hub_name, stream, LINES_TYPE, refusal, success_line, _progress_line, ollama_failure_line)
    if not stream:
        return Answer(200, success_line.rstrip(), JSON_TYPE)
    return Answer(200, _pull_line("pulling manifest") + success_line, LINES_TYPE.encode())


def _progress_line(fraction: float) -> bytes:
    return _pull_line(f"pulling {fraction:.0%}" if fraction else "pulling manifest")


def _pull_line(status: str) -> bytes:
    return encode_go({"status": status}) + b"\n"


def refuse_change(
    struct: str, subject: str, members: Sequence[str], served_member: str | None
) -> Callable[[bytes, RequestContext, ServerFacts], Answer]:
    """Return a reader that refuses to change models; ``members`` are the names of models that it needs, ``struct`` is
    the original's name for the body's type.

    The model that ``served_member`` names has to exist: clients take 404 for "there is nothing to delete".
    """
    wording = OllamaWording(struct)

    def refuse(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
        fields = decode_fields(body, wording)
        for member in members:
            _read_name(fields, member)
        if served_member is not None:
            _find_card(fields, facts, served_member)
        raise Unsupported(f"{subject} is not available on this server: its operator chooses its models.")

    return refuse


def copy_error(error: ParleyError) -> Answer:
    """Return an error about copying a model, whose name this route quotes otherwise than the rest."""
    answer = ollama_error_answer(error)
    if isinstance(error, UnknownModel) and answer.status == 404:
        return go_answer({"error": f'model "{error.name}" not found'}, 404)
    return answer


def refuse_blob(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Refuse to store a file. Raises Unsupported."""
    raise Unsupported("Uploading files is not available on this server: its operator chooses its models.")


def answer_no_blob(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer that there is no file of this digest."""
    return Answer(404)


def _read_name(fields: Fields, member: str) -> str:
    """Return the name in a member, or else in the older ``name``. Go's client sends the empty one as well."""
    is_older = fields.has_value("name") and fields.raw_value(member) in (None, "")
    return read_ollama_model_name(fields, "name" if is_older else member)


def _find_card(fields: Fields, facts: ServerFacts, member: str = "model") -> tuple[str, ModelCard]:
    """Return the name in a body and its card. Raises BadRequest, UnknownModel."""
    name = _read_name(fields, member)
    cards = {card.name: card for card in facts.cards}
    known_name = match_known_name(name, cards)
    if known_name is None:
        raise UnknownModel(f"model '{name}' not found", name=name, served=list(cards), field=member)
    return name, cards[known_name]


def _list_entry(card: ModelCard) -> dict[str, Any]:
    """Return the members that both lists of models have."""
    name = tagged_name(card.name)
    return {
        "name": name,
        "model": name,
        "modified_at": go_time(card.created),
        "size": card.info.weights_bytes if card.info is not None else 0,
        "digest": _model_digest(card),
        "details": _details_object(card),
    }


def _model_digest(card: ModelCard) -> str:
    """Return a digest that stays the same as long as the model does."""
    info = card.info
    numbers = (info.architecture, info.parameters, info.dtype, info.quantization) if info is not None else ()
    return hashlib.sha256(repr((card.root, card.name, *numbers)).encode()).hexdigest()


def _details_object(card: ModelCard) -> dict[str, Any]:
    architecture = _architecture_name(card)
    return {
        "parent_model": card.root if card.adapter_folder else "",
        "format": card.weight_format,
        "family": architecture,
        "families": [architecture],
        "parameter_size": _size_in_words(card.info.parameters) if card.info is not None else "",
        "quantization_level": _quantization_level(card),
    }


def _model_lengths(card: ModelCard) -> dict[str, int]:
    """Return the lengths of the context and of a token's vector, which only the list of models has in its details."""
    width = _text_config(card.config).get("hidden_size")
    lengths = {"context_length": card.max_model_len, "embedding_length": width if isinstance(width, int) else None}
    return {name: length for name, length in lengths.items() if length}


def _architecture_name(card: ModelCard) -> str:
    model_type = _text_config(card.config).get("model_type") or card.config.get("model_type")
    return model_type if isinstance(model_type, str) and model_type else "unknown"


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json about the language model, which others have inside a member."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _size_in_words(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.{1 if unit == 'B' else 2}f}{unit}"
    return str(count)


def _quantization_level(card: ModelCard) -> str:
    if card.info is None:
        return ""
    quantization = card.info.quantization
    if quantization == "none":
        return DTYPE_LEVELS.get(card.info.dtype, card.info.dtype.upper())
    return QUANTIZED_LEVELS.get(quantization, quantization.upper())


def _model_capabilities(card: ModelCard) -> dict[str, list[str]]:
    """Return the model's abilities, in the words that clients choose models by."""
    names = []
    if card.purpose != "vectors":
        names = ["completion", *(name for ability, name in ABILITY_NAMES.items() if ability in card.abilities)]
    if card.info is not None and "image" in card.info.media_kinds:
        names.append("vision")
    if card.info is not None and "audio" in card.info.media_kinds:
        names.append("audio")
    if card.purpose == "vectors" and (card.info is None or "embed" in card.info.pooling_tasks):
        names.append("embedding")
    return {"capabilities": names} if names else {}


def _parameter_lines(defaults: Mapping[str, float]) -> str:
    """Return the sampling values that the model's makers recommend, one to a line."""
    shown = {
        PARAMETER_NAMES.get(name, name): value for name, value in defaults.items() if name not in HIDDEN_PARAMETERS
    }
    return "\n".join(f"{name:<30} {value:g}" for name, value in shown.items())


def _write_modelfile(card: ModelCard, template: str, parameters: str) -> str:
    """Return the file that would make the model anew at the original, which typed clients require."""
    lines = [f"FROM {tagged_name(card.name)}", f'TEMPLATE """{template}"""']
    lines += (f"PARAMETER {' '.join(line.split())}" for line in parameters.splitlines())
    return "\n".join(lines) + "\n"


def _template_stand_in(card: ModelCard) -> str:
    """Return a text with the variables that clients look for in a template, as signs of the model's abilities."""
    parts = []
    if "insert" in card.abilities:
        parts.append("{{ if .Suffix }}{{ .Prompt }}{{ .Suffix }}{{ else }}")
    if "tools" in card.abilities and card.purpose == "chat":
        parts.append("{{ if .Tools }}{{ .Tools }}{{ end }}")
    parts.append("{{ .System }}{{ .Prompt }}" if card.purpose == "chat" else "{{ .Prompt }}")
    return "".join(parts) + ("{{ end }}" if "insert" in card.abilities else "")


def _shown_name(name: str, card: ModelCard, headers: Mapping[bytes, bytes]) -> str:
    """Return the model's base name; Copilot shows it, and looks for the name that it asked for."""
    return name if COPILOT_AGENT in headers.get(b"user-agent", b"") else card.name.rpartition("/")[2]


def _model_info(card: ModelCard, base_name: str) -> dict[str, Any]:
    """Return the model's numbers under the names that GGUF files have for them."""
    architecture, config = _architecture_name(card), _text_config(card.config)
    members: dict[str, Any] = {"general.architecture": architecture, "general.basename": base_name}
    if card.info is not None:
        members["general.parameter_count"] = card.info.parameters
        members[f"{architecture}.vocab_size"] = card.info.vocab_size
    if card.max_model_len is not None:
        members[f"{architecture}.context_length"] = card.max_model_len
    for name, source in CONFIG_MEMBERS.items():
        if isinstance(value := config.get(source), int):
            members[f"{architecture}.{name}"] = value
    return dict(sorted(members.items()))
