"""Turns named values, wherever they came from, into a request. Values are scalars or lists of them.

Names are those of vLLM's sampling parameters and of TensorRT-LLM's inputs. Like the original, it converts text where a
number is due. Unknown names are ignored; known ones that are not available are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parley.dialects import forms
from parley.dialects.dialect import Head
from parley.dialects.fields import Fields
from parley.dialects.forms import MAX_CHARACTERS, Kind
from parley.dialects.parameters import (
    MAX_ID,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP,
    Choices,
    beam,
    choices,
    sampling,
    truncation,
)
from parley.dialects.triton import embedding
from parley.dialects.triton.document import parse
from parley.dialects.triton.errors import about
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.errors import BadRequest, Invalid, Unsupported, excerpt
from parley.types import Grammar, Request, Sampling, Stop, Text, Want

MAX_TEMPERATURE = 1000.0  # far below this, all tokens are already equally probable
DEFAULT_TOKENS = 16
MICRO = 1_000_000  # microseconds in a second
LEVEL = 5  # the default priority, also for 0

# Other names for the same parameters, from several versions of TensorRT-LLM.
ALIASES = {
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "streaming": "stream",
    "sampling_param_best_of": "best_of",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "sampling_param_return_perf_metrics": "return_perf_metrics",
}
WHOLE = {"max_tokens", "min_tokens", "top_k", "n", "best_of", "beam_width", "seed", "logprobs", "prompt_logprobs",
         "end_id", "pad_id", "no_repeat_ngram_size", "truncate_prompt_tokens", "priority", "timeout"}  # fmt: skip
OWN = frozenset({"priority", "timeout"})  # parameters of the protocol rather than of a model
REAL = {"temperature", "top_p", "min_p", "typical_p", "length_penalty", "repetition_penalty", "presence_penalty",
        "frequency_penalty"}  # fmt: skip
FLAGS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
         "detokenize", "use_beam_search", "early_stopping", "watermark",
         *(name for name, t in INPUTS.items() if t.datatype == "BOOL")}  # fmt: skip
STRUCTURES = {"stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "structured_outputs", "guided_decoding",
              "guided_choice", "guided_json", "logits_processors", "bad_words"}  # fmt: skip

# Known but not available, each with the reason. Null, false, 0, -1 and empty values ask for nothing and pass.
FEATURES = {
    "lora_task_id": "LoRA feature is not enabled.",
    "lora_weights": "LoRA feature is not enabled.",
    "lora_config": "LoRA feature is not enabled.",
    "logits_processors": "Custom logits processors are not available on this server.",
    "prompt_logprobs": "Log-probabilities of the prompt are not available through this API.",
    "image": "The model does not read images.",
    "image_url": "The model does not read images.",
    "decoder_text_input": "The model has no encoder.",
    "return_context_logits": "Raw logits are not available on this server.",
    "return_generation_logits": "Raw logits are not available on this server.",
    "return_perf_metrics": "Timings in answers are not available on this server.",
    "prompt_embedding_table": "Embeddings as a prompt are not available on this server.",
    "prompt_table_extra_id": "Embeddings as a prompt are not available on this server.",
    "prompt_vocab_size": "Embeddings as a prompt are not available on this server.",
    "embedding_bias_words": "Bias by words is not available on this server; 'logit_bias' is.",
    "embedding_bias_weights": "Bias by words is not available on this server; 'logit_bias' is.",
    "num_draft_tokens": "Draft models are not available on this server.",
    "use_draft_logits": "Draft models are not available on this server.",
}
SCORED = frozenset({"cumulative_logprob", "cum_log_probs", "output_log_probs"})  # outputs that need log-probabilities
FORMS = ("structured_outputs", "guided_decoding")  # an object of constraints, or its JSON text
GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
GUIDES: dict[str, Kind] = {  # TensorRT-LLM's guide types; "json" has no guide
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
KNOWN = WHOLE | REAL | FLAGS | STRUCTURES | set(ALIASES) | set(FEATURES) | set(GUIDED) | set(FORMS) | {"lora_name"}


@dataclass(slots=True)
class Asked:
    """A request and the outputs the client wants of it. ``echo``: the text begins with the prompt."""

    id: str
    request: Request
    text: str
    stream: bool
    echo: bool
    outputs: set[str] = field(default_factory=set)
    told: int | None = None  # top alternatives in the output "logprobs"; None: it is the text "null"


def read(values: dict[str, Any], id: str, head: Head, wanted: set[str] | None = None) -> Asked:
    """Read a request. ``wanted``: outputs requested by name; None: the values decide. Raises BadRequest."""
    require(values, id, head.path["model"])
    body = Fields(_gather(values))
    _refuse(body)
    text = body.string("text_input", "")
    stream = body.boolean("stream", False)
    outputs = {o.name for o in OUTPUTS.values() if not o.asked_by or body.boolean(o.asked_by, False)}
    if wanted is not None:
        outputs = wanted
    if (vector := embedding.read(body, head)) is not None:
        vector.priority, vector.timeout = _priority(body), _timeout(body)
        return Asked(id, vector, "", False, False, outputs)
    told = body.integer("logprobs", None, -1, MAX_TOP)
    scored = not outputs.isdisjoint(SCORED) or (told is not None and "logprobs" in outputs)
    stop = _stop(body)
    request = Request(
        id=head.id,
        model=head.path["model"],
        prompts=[Text(text)],
        sampling=_sampling(body),
        stop=stop,
        want=Want(
            logprobs=(told or 0) if scored else None,
            skip_special=body.boolean("skip_special_tokens", True),
            ids="num_output_tokens" in outputs,
        ),
        banned=_strings(body, "bad_words"),
        **_choices(body)._asdict(),
        priority=_priority(body),
        grammar=_grammar(body),
        adapter=body.string("lora_name", None) or None,
        timeout=_timeout(body),
        truncate=truncation(body, head.context - (stop.max_tokens or 0)),
    )
    return Asked(id, request, text, stream, not body.boolean("exclude_input_in_output", stream), outputs, told)


def require(values: dict[str, Any], id: str, model: str) -> None:
    """Raise Invalid if a mandatory input is missing."""
    missing = [tensor.name for tensor in INPUTS.values() if not tensor.optional and tensor.name not in values]
    if missing:
        given = [name for name in values if name in INPUTS]
        raise about(
            id,
            f"expected number of inputs between {len(missing)} and {len(INPUTS)} but got {len(given)} inputs for model "
            f"'{model}'. Got input(s) {given}, but missing required input(s) {missing}. Please provide all required "
            "input(s).",
        )


def _gather(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values under one name each, converted. ``sampling_parameters`` overrides all other parameters."""
    text = values.get("sampling_parameters")
    if text:
        try:
            inner = parse(text.encode())
        except BadRequest:
            raise Invalid(
                "'sampling_parameters' must be the text of a JSON object.", field="sampling_parameters"
            ) from None
        values = inner | {n: v for n, v in values.items() if n in OWN or (n in INPUTS and not INPUTS[n].loose)}
    gathered: dict[str, Any] = {}
    for given, value in values.items():
        name = ALIASES.get(given, given)
        value = _convert(name, value)
        if name in gathered and gathered[name] != value:
            raise Invalid(f"'{given}' and '{name}' are the same parameter, but their values differ.", field=given)
        gathered[name] = value
    return gathered


def _convert(name: str, value: Any) -> Any:
    """Convert text to the number or boolean that it spells; other text is left for the reader to refuse."""
    if not isinstance(value, str) or len(value) > 64:
        return value
    if name in FLAGS:
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    try:
        if name in WHOLE:
            return int(value)
        if name in REAL:
            return float(value)
    except ValueError:
        pass
    return value


def _refuse(body: Fields) -> None:
    for name, reason in FEATURES.items():
        value = body.raw(name)
        if isinstance(value, list):
            value = [item for item in value if item != ""]
        if value and value != -1:
            raise Unsupported(f"'{name}': {reason}", field=name)


def _priority(body: Fields) -> int:
    """Return the priority relative to the default level; level 1 is the most urgent."""
    level = body.integer("priority", 0, 0)
    return level - LEVEL if level else 0


def _timeout(body: Fields) -> float | None:
    """Return the timeout in seconds, from microseconds; None for 0."""
    return body.integer("timeout", 0, 0) / MICRO or None


def _sampling(body: Fields) -> Sampling:
    body.integer("pad_id", None)  # checked only: nothing is padded
    return sampling(body, hottest=MAX_TEMPERATURE)


def _stop(body: Fields) -> Stop:
    strings = [string for name in ("stop", "stop_words") for string in _strings(body, name)]
    end = body.integer("end_id", None, -1, MAX_ID)
    ids = body.integers("stop_token_ids", cap=MAX_STOPS, low=0, high=MAX_ID)
    max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 1, MAX_ID)
    min_tokens = body.integer("min_tokens", 0, 0, MAX_ID)
    if min_tokens > max_tokens:
        raise body.fail("min_tokens", f"must be at most max_tokens, which is {max_tokens}, but got {min_tokens}.")
    return Stop(
        strings=strings,
        ids=[*ids, end] if end is not None and end >= 0 else ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos", False) or end == -1,
        include=body.boolean("include_stop_str_in_output", False),
        reserve=1,
    )


def _grammar(body: Fields) -> Grammar | None:
    """Return the grammar of the answer. Raises BadRequest."""
    wishes = [forms.constraint(body, name, kind) for name, kind in GUIDED.items()]
    for name in FORMS:
        if body.raw(name):
            spelled = body.spelled(name, cap=MAX_CHARACTERS) if isinstance(body.raw(name), str) else body
            wish = spelled.object(name)
            wishes.append(None if wish is None else forms.structured(wish))
    return forms.one(*wishes, _guide(body))


def _guide(body: Fields) -> Grammar | None:
    """Return TensorRT-LLM's guided decoding: two texts, a type and a guide of that type. Raises BadRequest."""
    given = body.string("guided_decoding_guide_type", "")
    text = body.string("guided_decoding_guide", "", cap=MAX_CHARACTERS)
    if not given:
        if text:
            raise body.missing("guided_decoding_guide_type")
        return None
    if given == "json":
        return Grammar("json", forms.OBJECT, field="guided_decoding_guide_type")
    if given not in GUIDES:
        known = ", ".join(("json", *GUIDES))
        raise body.fail("guided_decoding_guide_type", f"must be one of {known}, but got {excerpt(given)}.")
    if not text:
        raise body.missing("guided_decoding_guide")
    return forms.constraint(body, "guided_decoding_guide", GUIDES[given])


def _strings(body: Fields, name: str) -> list[str]:
    """Return the strings of a member; empty ones are dropped."""
    value = body.raw(name)
    value = [text for text in value if text != ""] if isinstance(value, list) else value
    return Fields({name: value or None}).strings(name, cap=MAX_STOPS, total=MAX_STOP_CHARACTERS)


def _choices(body: Fields) -> Choices:
    """Return the number of answers. TensorRT-LLM's ``beam_width`` gives one answer per beam by default."""
    width = body.integer("beam_width", 1, 1, MAX_N)
    if width == 1:
        return choices(body)
    n = body.integer("n", width, 1, MAX_N)
    if n > width:
        raise body.fail("beam_width", f"must be at least the number of sequences, which is {n}, but got {width}.")
    return Choices(n, None, beam(body, width, "beam_width"))
