"""The ``parameters`` of a generation: types and nulls, checks in the original's order, and their neutral meaning.

As in the original, all members are read before any is checked: a wrong type anywhere is reported before any other
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from parley.dialects.fields import MAX_DEPTH, MAX_F32, MAX_I32, MAX_U32, MAX_U64, Fields, is_shallow
from parley.dialects.json_body import decode_json
from parley.dialects.output_constraints import ANY_OBJECT_SCHEMA
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi.api_rules import TgiRules
from parley.dialects.tgi.refusal_wording import TGI_WORDING
from parley.errors import InvalidValue
from parley.types import Grammar, SamplingOptions, StopConditions

RESERVED_TOKENS = 1024  # how many of max_new_tokens must fit; the rest is generated as far as there is room
MAX_STOP_CHARACTERS = 16_384  # of all stop strings together
NOT_NULL = {
    "do_sample": "a boolean",
    "stop": "an array",
    "watermark": "a boolean",
    "details": "a boolean",
    "decoder_input_details": "a boolean",
}
NO_ADAPTER_NAMES = ("None", "null")  # MindIE's clients write the first, an example of TGI's document the second
NEWER_MEMBERS = frozenset({"frequency_penalty", "top_n_tokens", "grammar", "adapter_id"})  # version 0.9.4 ignores these
OLD_MAX_NEW_TOKENS = 20  # default of version 0.9.4
GRAMMAR_TYPES = ("json", "json_object", "regex", "json_schema")


class TgiParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters as the client sent them; None if absent."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: tuple[str, Any] | None = None  # type and value
    adapter_id: str | None = None
    reserve: int | None = RESERVED_TOKENS

    @property
    def draws_tokens(self) -> bool:
        """True if tokens are sampled, not picked greedily: on request, or implied by a sampling parameter."""
        changed = self.temperature not in (None, 1.0) or self.top_p not in (None, 1.0)
        return self.temperature != 0 and (
            self.do_sample or changed or bool(self.top_k) or self.typical_p not in (None, 1.0)
        )

    @property
    def neutral_sampling(self) -> SamplingOptions:
        """The parameters in neutral form."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingOptions(
            temperature=temperature if self.draws_tokens else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            typical_p=1.0 if self.typical_p is None else self.typical_p,
            seed=self.seed,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            watermark=self.watermark,
        )

    def build_grammar(self, field: str) -> Grammar | None:
        """Return the grammar of the answer. Like the original, it allows objects with the declared members only."""
        if self.grammar is None:
            return None
        kind, value = self.grammar
        if kind == "regex":
            return Grammar("regex", value, field=field)
        schema = msgspec.json.decode(value) if isinstance(value, str) else value
        return Grammar("json", {**ANY_OBJECT_SCHEMA, **schema}, field=field)

    @property
    def stop_conditions(self) -> StopConditions:
        """The stop conditions in neutral form."""
        return StopConditions(
            strings=self.stop, max_tokens=self.max_new_tokens, include_in_output=True, reserved_tokens=self.reserve
        )


def read_tgi_parameters(body: Fields, rules: TgiRules) -> TgiParameters:
    """Read all members and check their types. Raises BadRequest."""
    if rules.strict and body.is_null("parameters"):
        raise body.mistyped_member("parameters", "an object")
    parameters_object = body.object("parameters")
    fields = parameters_object or Fields({}, "parameters", TGI_WORDING)
    if rules.old:
        fields = fields.without_members(NEWER_MEMBERS)
    if rules.strict:
        for name, expected_type in NOT_NULL.items():
            if fields.is_null(name):
                raise fields.mistyped_member(name, expected_type)
        if rules.old and fields.is_null("max_new_tokens"):
            raise fields.mistyped_member("max_new_tokens", "an integer")
        if isinstance(fields.raw_value("stop"), str):
            raise fields.mistyped_member("stop", "an array")
    return TgiParameters(
        best_of=fields.integer("best_of", None, 0, MAX_U64),
        temperature=fields.number("temperature", None, -MAX_F32, MAX_F32),
        repetition_penalty=fields.number("repetition_penalty", None, -MAX_F32, MAX_F32),
        frequency_penalty=fields.number("frequency_penalty", None, -MAX_F32, MAX_F32),
        top_k=fields.integer("top_k", None, -MAX_I32 - 1, MAX_I32),
        top_p=fields.number("top_p", None, -MAX_F32, MAX_F32),
        typical_p=fields.number("typical_p", None, -MAX_F32, MAX_F32),
        do_sample=fields.boolean("do_sample", parameters_object is None and not rules.old),
        max_new_tokens=fields.integer("max_new_tokens", OLD_MAX_NEW_TOKENS if rules.old else None, 0, MAX_U32),
        return_full_text=fields.boolean("return_full_text", None),
        stop=fields.strings("stop", cap=MAX_U32, total=MAX_U32),
        truncate=fields.integer("truncate", None, 0, MAX_U64),
        watermark=fields.boolean("watermark", False),
        details=fields.boolean("details", False),
        decoder_input_details=fields.boolean("decoder_input_details", False),
        seed=fields.integer("seed", None, 0, MAX_U64),
        top_n_tokens=fields.integer("top_n_tokens", None, 0, MAX_U32),
        grammar=read_tgi_grammar(fields, "grammar"),
        adapter_id=fields.string("adapter_id", None, cap=256),
        reserve=None if rules.old else RESERVED_TOKENS,
    )


def choose_adapter(name: str | None, rules: TgiRules, context: RequestContext) -> str | None:
    """Return the adapter that ``adapter_id`` means, None for the base model.

    As in the original, an unknown adapter is the base model. Lenient rules keep an unknown name, which is refused then,
    where there are adapters that the client may have meant.
    """
    if not name or name in context.adapters:
        return name or None
    unmeant = rules.strict or not context.adapters or name in NO_ADAPTER_NAMES or name in context.model_names
    return None if unmeant else name


def read_tgi_grammar(fields: Fields, name: str) -> tuple[str, Any] | None:
    """Return a grammar's type and value. The value's content is checked last, by ``check_tgi_parameters``."""
    grammar_object = fields.object(name)
    if grammar_object is None:
        return None
    kind = grammar_object.string("type", None, allowed=GRAMMAR_TYPES)
    if kind is None:
        raise grammar_object.missing_member("type")
    value = grammar_object.raw_value("value")
    if value is None and not grammar_object.is_null("value"):
        raise grammar_object.missing_member("value")
    if kind == "regex" and not isinstance(value, str):
        raise grammar_object.mistyped_member("value", "a string")
    if kind == "json_schema":
        schema = grammar_object.object("value")
        if schema is None:
            raise grammar_object.mistyped_member("value", "an object")
        schema.string("name", None)
        if not schema.has_value("schema") and not schema.is_null("schema"):
            raise schema.missing_member("schema")
        value = schema.raw_value("schema")
    elif isinstance(value, dict):
        grammar_object.free_object("value")
    return kind, value


def check_tgi_parameters(params: TgiParameters, rules: TgiRules, *, empty: bool, stream: bool, context: int) -> None:
    """Check ranges and combinations; report the first fault. ``empty``: the prompt is empty. Raises InvalidValue."""
    fault = next(_find_faults(params, empty, rules, stream, context), None)
    if fault is not None:
        raise InvalidValue(fault)
    if sum(map(len, params.stop)) > MAX_STOP_CHARACTERS:
        raise InvalidValue(f"`stop` supports up to {MAX_STOP_CHARACTERS} characters in all.", field="stop")
    if params.grammar is not None:
        _check_grammar_value(*params.grammar, rules)


def _find_faults(params: TgiParameters, empty: bool, rules: TgiRules, stream: bool, context: int) -> Iterator[str]:
    best_of = 1 if params.best_of is None else params.best_of
    multiple = best_of > 1
    if stream and best_of != 1:
        yield "`best_of` != 1 is not supported when streaming tokens"
    if stream and params.decoder_input_details:
        yield "`decoder_input_details` == true is not supported when streaming tokens"
    if best_of > rules.max_best_of:
        yield f"`best_of` must be > 0 and <= {rules.max_best_of}. Given: {best_of}"
    sampling_members = (params.temperature, params.top_k, params.top_p, params.typical_p)
    if multiple and not params.do_sample and all(value is None for value in sampling_members):
        yield "you must use sampling when `best_of` is > 1"
    if not _is_positive(params.temperature, rules):
        yield "`temperature` must be strictly positive"
    if not _is_positive(params.repetition_penalty):
        yield "`repetition_penalty` must be strictly positive"
    if params.frequency_penalty is not None and not -2.0 <= params.frequency_penalty <= 2.0:
        yield "`frequency_penalty` must be >= -2.0 and <= 2.0"
    if not _is_fraction(params.top_p, rules):
        yield "`top_p` must be > 0.0 and < 1.0"
    if not _is_fraction(params.typical_p, rules):
        yield "`typical_p` must be > 0.0 and < 1.0"
    if not _is_positive(params.top_k, rules):
        yield "`top_k` must be strictly positive"
    if params.max_new_tokens == 0:
        yield "`max_new_tokens` must be strictly positive"
    if len(params.stop) > rules.max_stops:
        yield f"`stop` supports up to {rules.max_stops} stop sequences. Given: {len(params.stop)}"
    if multiple and params.seed is not None:
        yield "`seed` must not be set when `best_of` > 1"
    if (params.top_n_tokens or 0) > rules.max_top:
        yield f"`top_n_tokens` must be >= 0 and <= {rules.max_top}. Given: {params.top_n_tokens}"
    if empty:
        yield "`inputs` cannot be empty"
    if params.truncate is not None and not 0 < params.truncate < context:
        yield f"`truncate` must be strictly positive and less than {context - 1}. Given: {params.truncate}"


def _is_positive(value: float | None, rules: TgiRules | None = None) -> bool:
    """True if absent or greater than 0; lenient rules also allow 0."""
    return value is None or value > 0 or (value == 0 and rules is not None and not rules.strict)


def _is_fraction(value: float | None, rules: TgiRules) -> bool:
    """True if absent or between 0 and 1; lenient rules also allow 1."""
    return value is None or 0 < value < 1 or (value == 1 and not rules.strict)


def _check_grammar_value(kind: str, value: Any, rules: TgiRules) -> None:
    """Check the content of a grammar. Raises InvalidValue."""
    if kind == "regex":
        return
    if isinstance(value, str):
        try:
            value = decode_json(value.encode())
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidValue(f"grammar is not valid: {error}", field="grammar") from None
    if not isinstance(value, dict) or not is_shallow(value, MAX_DEPTH):
        raise InvalidValue("grammar is not supported", field="grammar")
    if rules.strict and "properties" not in value:
        raise InvalidValue("grammar is not valid: Grammar must have a 'properties' field", field="grammar")
