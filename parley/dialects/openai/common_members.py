"""Members that requests of several OpenAI routes have: sampling, stopping, choices, usage and log-probabilities."""

from __future__ import annotations

from parley.dialects import sampling_members
from parley.dialects.fields import Fields
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules, applied_options
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.sampling_members import MAX_ALTERNATIVES, MAX_STOP_CHARACTERS, MAX_TOKEN_ID, ChoiceCounts
from parley.errors import Unsupported
from parley.types import RepetitionPattern, SamplingOptions, StopConditions

MAX_TOTAL_CHOICES = 2048  # n times the number of prompts
MAX_STOP_IDS = 1024
MAX_TOKENS = 2**31 - 1
MAX_PATTERN_TOKENS = 1024  # tokens


def read_openai_sampling(body: Fields) -> SamplingOptions:
    """Read the members that control how a token is drawn."""
    return sampling_members.read_sampling(body, max_temperature=2)


def read_stop_conditions(body: Fields, max_tokens: int | None, rules: ReadingRules = OPENAI_RULES) -> StopConditions:
    """Read the members that control when to stop. Raises BadRequest."""
    min_tokens = body.integer("min_tokens", 0, 0, MAX_TOKENS)
    if max_tokens is not None and min_tokens > max_tokens:
        raise body.member_error(
            "min_tokens", f"must be at most max_tokens, which is {max_tokens}, but got {min_tokens}."
        )
    include = body.boolean("include_stop_str_in_output", False)
    return StopConditions(
        strings=body.strings("stop", cap=rules.max_stops, total=MAX_STOP_CHARACTERS),
        ids=body.integers("stop_token_ids", cap=MAX_STOP_IDS, low=0, high=MAX_TOKEN_ID),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos", False),
        include_in_output=body.boolean("no_stop_trim", include),  # SGLang's name
        reserved_tokens=rules.reserved_tokens,
        repetition=_read_repetition(body),
    )


def _read_repetition(body: Fields) -> RepetitionPattern | None:
    """Read vLLM's ``repetition_detection``, which ends a repetitive output. None if patterns have no tokens."""
    detection = body.object("repetition_detection")
    if detection is None:
        return None
    max_size = detection.integer("max_pattern_size", 0, 0, MAX_PATTERN_TOKENS)
    min_size = detection.integer("min_pattern_size", 0, 0, MAX_PATTERN_TOKENS)
    count = detection.integer("min_count", 0, 0, MAX_TOKENS)
    if not max_size:
        return None
    if min_size > max_size:
        raise detection.member_error(
            "min_pattern_size", f"must be at most max_pattern_size, which is {max_size}, but got {min_size}."
        )
    if count < 2:
        raise detection.member_error("min_count", f"must be at least 2, but got {count}.")
    return RepetitionPattern(max(1, min_size), max_size, count)


def read_stream_interval(body: Fields) -> int:
    """Return the minimum number of tokens of a chunk, a member of vLLM's."""
    return body.integer("stream_interval", 1, 1, MAX_TOKENS)


def read_capped_choices(body: Fields, prompts: int, rules: ReadingRules = OPENAI_RULES) -> ChoiceCounts:
    """Read the choice counts, and check the limit over all prompts. Raises BadRequest."""
    counts = sampling_members.read_choice_counts(body, ranked=rules.best_of)
    name, per_prompt = ("n", counts.n) if counts.best_of is None else ("best_of", counts.best_of)
    if per_prompt * prompts > MAX_TOTAL_CHOICES:
        raise body.member_error(
            name, f"{prompts} prompts times {name} = {per_prompt} is more than {MAX_TOTAL_CHOICES} choices."
        )
    return counts


def read_usage_options(body: Fields, stream: bool, options: ApiOptions) -> tuple[bool, bool]:
    """Return whether usage is requested at the end of the stream, and in each chunk. Raises BadRequest."""
    stream_options = body.object("stream_options")
    at_end = every_chunk = stream and options.force_include_usage
    if stream_options is None:
        return at_end, every_chunk
    if not stream:
        raise body.member_error("stream_options", "only allowed when 'stream' is true.")
    at_end = stream_options.boolean("include_usage", False) or at_end
    return at_end, (stream_options.boolean("continuous_usage_stats", False) and at_end) or every_chunk


def read_alternatives(body: Fields, name: str, rules: ReadingRules, context: RequestContext) -> int | None:
    """Return the number of alternatives whose log-probabilities are requested, or None. Raises BadRequest."""
    match applied_options(context, rules).max_logprobs:
        case None:
            return body.integer(name, None, rules.min_alternatives, MAX_ALTERNATIVES)
        case -1:
            return body.integer(name, None, -1, MAX_TOKENS)
        case limit:
            allows_all = 0 < context.vocabulary_size <= limit
            return body.integer(name, None, -1 if allows_all else 0, limit)


def read_identifier(fields: Fields) -> str:
    """Return the name of a function or schema: 1 to 64 letters, digits, underscores and dashes. Raises BadRequest."""
    text = fields.string("name", None, cap=64)
    if text is None:
        raise fields.missing_member("name")
    if not text or not text.isascii() or not text.replace("_", "").replace("-", "").isalnum():
        raise fields.member_error("name", "must be made of letters, digits, underscores and dashes.")
    return text


def unsupported_member_error(body: Fields, member: str, subject: str) -> Unsupported:
    """Return the error for a member that asks for an unsupported feature; ``subject`` with its verb, "Media are"."""
    return Unsupported(f"Unsupported parameter: '{body.member_path(member)}'. {subject} not available on this server.",
                       field=body.member_path(member))  # fmt: skip
