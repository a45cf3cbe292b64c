"""Turns named values, wherever they came from, into a request. Values are scalars or lists of them.

Names are those of vLLM's sampling parameters and of TensorRT-LLM's inputs. Like the original, it converts text where a
number is due. Unknown names are ignored; known ones that are not available are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parley.dialects import output_constraints
from parley.dialects.fields import Fields
from parley.dialects.output_constraints import MAX_GRAMMAR_CHARACTERS, ConstraintKind
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import (
    MAX_ALTERNATIVES,
    MAX_CHOICES_PER_PROMPT,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    ChoiceCounts,
    read_beam_search,
    read_choice_counts,
    read_sampling,
    read_truncation,
)
from parley.dialects.triton import embedding
from parley.dialects.triton.document import parse_document
from parley.dialects.triton.error_answers import inputs_error
from parley.dialects.triton.images import IMAGE_INPUTS, read_triton_images
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.errors import BadRequest, InvalidValue, Unsupported, excerpt
from parley.types import Grammar, OutputOptions, Request, SamplingOptions, StopConditions, TextPrompt

MAX_TEMPERATURE = 1000.0  # far below this, all tokens are already equally probable
DEFAULT_TOKENS = 16
MICROSECONDS = 1_000_000  # microseconds in a second
DEFAULT_PRIORITY = 5  # the default priority, also for 0

# Neutral names of fields in the server's errors, and the names here.
TRITON_FIELD_NAMES = {"prompt": "text_input", "stop_ids": "stop_token_ids", "top_logprobs": "logprobs"}

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
INTEGER_NAMES = {
    "max_tokens",
    "min_tokens",
    "top_k",
    "n",
    "best_of",
    "beam_width",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "end_id",
    "pad_id",
    "no_repeat_ngram_size",
    "truncate_prompt_tokens",
    "priority",
    "timeout",
}
PROTOCOL_NAMES = frozenset({"priority", "timeout"})  # parameters of the protocol rather than of a model
NUMBER_NAMES = {
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "length_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
BOOLEAN_NAMES = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
         "detokenize", "use_beam_search", "early_stopping", "watermark",
         *(name for name, tensor in INPUTS.items() if tensor.datatype == "BOOL")}  # fmt: skip
STRUCTURED_NAMES = {
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "guided_decoding",
    "guided_choice",
    "guided_json",
    "logits_processors",
    "bad_words",
}

# Known but not available, each with the reason. Null, false, 0, -1 and empty values ask for nothing and pass.
UNAVAILABLE = {
    "lora_task_id": "LoRA feature is not enabled.",
    "lora_weights": "LoRA feature is not enabled.",
    "lora_config": "LoRA feature is not enabled.",
    "logits_processors": "Custom logits processors are not available on this server.",
    "prompt_logprobs": "Log-probabilities of the prompt are not available through this API.",
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
# Outputs that need log-probabilities.
LOGPROB_OUTPUTS = frozenset({"cumulative_logprob", "cum_log_probs", "output_log_probs"})
CONSTRAINT_OBJECTS = ("structured_outputs", "guided_decoding")  # an object of constraints, or its JSON text
VLLM_GUIDES: dict[str, ConstraintKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
TENSORRT_GUIDES: dict[str, ConstraintKind] = {  # TensorRT-LLM's guide types; "json" has no guide
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
KNOWN_PARAMETERS = (
    INTEGER_NAMES
    | NUMBER_NAMES
    | BOOLEAN_NAMES
    | STRUCTURED_NAMES
    | set(ALIASES)
    | set(UNAVAILABLE)
    | set(IMAGE_INPUTS)
    | set(VLLM_GUIDES)
    | set(CONSTRAINT_OBJECTS)
    | {"lora_name"}
)


@dataclass(slots=True)
class TritonRequest:
    """A request and the outputs the client wants of it. ``echo``: the text begins with the prompt."""

    client_id: str
    request: Request
    text: str
    stream: bool
    echo: bool
    outputs: set[str] = field(default_factory=set)
    top_logprobs: int | None = None  # top alternatives in the output "logprobs"; None: it is the text "null"


def read_triton_request(
    values: dict[str, Any], request_id: str, context: RequestContext, output_names: set[str] | None = None
) -> TritonRequest:
    """Read a request. ``output_names``: outputs requested by name; None: the values decide. Raises BadRequest."""
    require_inputs(values, request_id, context.path_parts["model"])
    body = Fields(_gather_values(values))
    _refuse_unavailable(body)
    images = read_triton_images(body, context)
    text = body.string("text_input", "")
    stream = body.boolean("stream", False)
    outputs = {
        output.name for output in OUTPUTS.values() if not output.asked_by or body.boolean(output.asked_by, False)
    }
    if output_names is not None:
        outputs = output_names
    if (embedding_request := embedding.read_triton_embedding(body, context)) is not None:
        if images:
            field = images[0].media.field
            raise Unsupported(f"'{field}': Embeddings of images are not available on this server.", field=field)
        embedding_request.priority, embedding_request.timeout = _relative_priority(body), _timeout_seconds(body)
        return TritonRequest(request_id, embedding_request, "", False, False, outputs)
    top_logprobs = body.integer("logprobs", None, -1, MAX_ALTERNATIVES)
    with_logprobs = not outputs.isdisjoint(LOGPROB_OUTPUTS) or (top_logprobs is not None and "logprobs" in outputs)
    stop = _read_stop_conditions(body, context.vocabulary_size)
    request = Request(
        id=context.unique_id,
        model=context.path_parts["model"],
        prompts=[TextPrompt(text, media=images)],
        sampling=_read_triton_sampling(body),
        stop_conditions=stop,
        output_options=OutputOptions(
            logprobs=(top_logprobs or 0) if with_logprobs else None,
            skip_special=body.boolean("skip_special_tokens", True),
            ids="num_output_tokens" in outputs,
        ),
        banned_words=_nonempty_strings(body, "bad_words"),
        **_read_answer_counts(body)._asdict(),
        priority=_relative_priority(body),
        grammar=_read_grammar(body),
        adapter=body.string("lora_name", None) or None,
        timeout=_timeout_seconds(body),
        max_prompt_tokens=read_truncation(body, context.context_length - (stop.max_tokens or 0)),
    )
    return TritonRequest(
        request_id, request, text, stream, not body.boolean("exclude_input_in_output", stream), outputs, top_logprobs
    )


def require_inputs(values: dict[str, Any], request_id: str, model: str) -> None:
    """Raise InvalidValue if a mandatory input is missing."""
    missing_names = [tensor.name for tensor in INPUTS.values() if not tensor.optional and tensor.name not in values]
    if missing_names:
        present = [name for name in values if name in INPUTS]
        raise inputs_error(
            request_id,
            f"expected number of inputs between {len(missing_names)} and {len(INPUTS)} but got {len(present)} inputs "
            f"for model '{model}'. Got input(s) {present}, but missing required input(s) {missing_names}. "
            "Please provide all required input(s).",
        )


def _gather_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values under one name each, converted. ``sampling_parameters`` overrides all other parameters."""
    text = values.get("sampling_parameters")
    if text:
        try:
            inner = parse_document(text.encode())
        except BadRequest:
            raise InvalidValue(
                "'sampling_parameters' must be the text of a JSON object.", field="sampling_parameters"
            ) from None
        values = inner | {
            name: value
            for name, value in values.items()
            if name in PROTOCOL_NAMES or (name in INPUTS and not INPUTS[name].any_number_type)
        }
    gathered: dict[str, Any] = {}
    for given_name, value in values.items():
        name = ALIASES.get(given_name, given_name)
        value = _convert_text(name, value)
        if name in gathered and gathered[name] != value:
            raise InvalidValue(
                f"'{given_name}' and '{name}' are the same parameter, but their values differ.", field=given_name
            )
        gathered[name] = value
    return gathered


def _convert_text(name: str, value: Any) -> Any:
    """Convert text to the number or boolean that it spells; other text is left for the reader to refuse."""
    if not isinstance(value, str) or len(value) > 64:
        return value
    if name in BOOLEAN_NAMES:
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    try:
        if name in INTEGER_NAMES:
            return int(value)
        if name in NUMBER_NAMES:
            return float(value)
    except ValueError:
        pass
    return value


def _refuse_unavailable(body: Fields) -> None:
    for name, reason in UNAVAILABLE.items():
        value = body.raw_value(name)
        if isinstance(value, list):
            value = [item for item in value if item != ""]
        if value and value != -1:
            raise Unsupported(f"'{name}': {reason}", field=name)


def _relative_priority(body: Fields) -> int:
    """Return the priority relative to the default level; level 1 is the most urgent."""
    level = body.integer("priority", 0, 0)
    return level - DEFAULT_PRIORITY if level else 0


def _timeout_seconds(body: Fields) -> float | None:
    """Return the timeout in seconds, from microseconds; None for 0."""
    return body.integer("timeout", 0, 0) / MICROSECONDS or None


def _read_triton_sampling(body: Fields) -> SamplingOptions:
    body.integer("pad_id", None)  # checked only: nothing is padded
    return read_sampling(body, max_temperature=MAX_TEMPERATURE)


def _read_stop_conditions(body: Fields, vocabulary_size: int) -> StopConditions:
    """Read when an answer ends. ``vocabulary_size``: in tokens, 0 if it is not known. Raises BadRequest."""
    strings = [string for name in ("stop", "stop_words") for string in _nonempty_strings(body, name)]
    end_id = body.integer("end_id", None, -1, MAX_TOKEN_ID)
    # Clients turn the end off with -1, or with an id that no model generates: benchmarks of TensorRT-LLM send 1048576.
    endless = end_id is not None and (end_id == -1 or 0 < vocabulary_size <= end_id)
    ids = body.integers("stop_token_ids", cap=MAX_STOPS, low=0, high=MAX_TOKEN_ID)
    max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 1, MAX_TOKEN_ID)
    min_tokens = body.integer("min_tokens", 0, 0, MAX_TOKEN_ID)
    if min_tokens > max_tokens:
        raise body.member_error(
            "min_tokens", f"must be at most max_tokens, which is {max_tokens}, but got {min_tokens}."
        )
    return StopConditions(
        strings=strings,
        ids=ids if end_id is None or endless else [*ids, end_id],
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos", False) or endless,
        include_in_output=body.boolean("include_stop_str_in_output", False),
        reserved_tokens=1,
    )


def _read_grammar(body: Fields) -> Grammar | None:
    """Return the grammar of the answer. Raises BadRequest."""
    grammars = [output_constraints.read_constraint(body, name, kind) for name, kind in VLLM_GUIDES.items()]
    for name in CONSTRAINT_OBJECTS:
        if body.raw_value(name):
            parsed_body = (
                body.with_parsed_text(name, cap=MAX_GRAMMAR_CHARACTERS)
                if isinstance(body.raw_value(name), str)
                else body
            )
            constraints = parsed_body.object(name)
            grammars.append(None if constraints is None else output_constraints.read_structured_outputs(constraints))
    return output_constraints.only_constraint(*grammars, _read_tensorrt_guide(body))


def _read_tensorrt_guide(body: Fields) -> Grammar | None:
    """Return TensorRT-LLM's guided decoding: two texts, a type and a guide of that type. Raises BadRequest."""
    guide_type = body.string("guided_decoding_guide_type", "")
    text = body.string("guided_decoding_guide", "", cap=MAX_GRAMMAR_CHARACTERS)
    if not guide_type:
        if text:
            raise body.missing_member("guided_decoding_guide_type")
        return None
    if guide_type == "json":
        return Grammar("json", output_constraints.ANY_OBJECT_SCHEMA, field="guided_decoding_guide_type")
    if guide_type not in TENSORRT_GUIDES:
        known_types = ", ".join(("json", *TENSORRT_GUIDES))
        raise body.member_error(
            "guided_decoding_guide_type", f"must be one of {known_types}, but got {excerpt(guide_type)}."
        )
    if not text:
        raise body.missing_member("guided_decoding_guide")
    return output_constraints.read_constraint(body, "guided_decoding_guide", TENSORRT_GUIDES[guide_type])


def _nonempty_strings(body: Fields, name: str) -> list[str]:
    """Return the strings of a member; empty ones are dropped."""
    value = body.raw_value(name)
    value = [text for text in value if text != ""] if isinstance(value, list) else value
    return Fields({name: value or None}).strings(name, cap=MAX_STOPS, total=MAX_STOP_CHARACTERS)


def _read_answer_counts(body: Fields) -> ChoiceCounts:
    """Return the number of answers. TensorRT-LLM's ``beam_width`` gives one answer per beam by default."""
    width = body.integer("beam_width", 1, 1, MAX_CHOICES_PER_PROMPT)
    if width == 1:
        return read_choice_counts(body)
    n = body.integer("n", width, 1, MAX_CHOICES_PER_PROMPT)
    if n > width:
        raise body.member_error(
            "beam_width", f"must be at least the number of sequences, which is {n}, but got {width}."
        )
    return ChoiceCounts(n, None, read_beam_search(body, width, "beam_width"))
