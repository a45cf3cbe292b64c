"""``POST /v1/completions``: text or token ids in, text out, as chunks or as one answer.

A request may have several prompts; choice index = prompt number * n + k. With ``echo`` the text of a choice begins with
its prompt, and its log-probabilities with those of the prompt's tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects import sampling_members
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import prompts, vllm_members
from parley.dialects.openai.common_members import (
    MAX_TOKENS,
    read_alternatives,
    read_capped_choices,
    read_openai_sampling,
    read_stop_conditions,
    read_stream_interval,
    read_usage_options,
    unsupported_member_error,
)
from parley.dialects.openai.error_answers import openai_failure_events
from parley.dialects.openai.reading_rules import OPENAI_RULES, STRICT_OPENAI_RULES, ReadingRules, applied_options
from parley.dialects.openai.timings import metrics_member
from parley.dialects.openai.token_objects import FINISH_REASONS, finite_logprob, prompt_logprob_maps
from parley.dialects.openai.token_usage import openai_usage, running_usage
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE, choice_event_start, data_event
from parley.errors import ParleyError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    Prompt,
    PromptAccepted,
    PromptScored,
    Request,
    TextPrompt,
    TokenInfo,
    Usage,
)

MAX_PROMPTS = 1024
DEFAULT_TOKENS = 16

MAX_STRICT_LOGPROBS, MAX_STRICT_BEST_OF = 5, 20

PLAIN_CHOICE = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'


def read_completion_request(body: bytes, context: RequestContext) -> CompletionReply:
    """Read a completion request. Raises BadRequest."""
    return CompletionReply(decode_fields(body), context)


def read_strict_completion_request(body: bytes, context: RequestContext) -> StrictCompletionReply:
    """Read a completion request with the limits of OpenAI's own service. Raises BadRequest."""
    return StrictCompletionReply(decode_fields(body), context)


class LogprobLists:
    """The parallel lists of a choice's log-probabilities, and the current offset in its text.

    ``top``: the number of alternatives that a prompt token's map has in addition to the token itself; -1: all of them.
    ``skip_special``: special tokens are listed, but are not part of the text.
    """

    def __init__(self, top: int, id_names: bool, skip_special: bool = True):
        self._top = None if top < 0 else top
        self._tokens_as_ids = id_names
        self._skip_special = skip_special
        self._text_offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.clear_lists()

    def clear_lists(self) -> None:
        """Empty the lists."""
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_output(self, tokens: list[TokenInfo]) -> None:
        """Append tokens of the output."""
        for token in tokens:
            self._append_token(token, token.top_tokens)
            if not (token.is_special and self._skip_special):
                self._text_offset += len(self._decoder.decode(token.raw_bytes))

    def add_prompt(self, tokens: list[TokenInfo], text: str) -> None:
        """Append tokens of the prompt, whose text begins the choice's. Some of their text may be missing from it."""
        for token in tokens:
            self._append_token(token, token.top_tokens[: self._top])
            piece = self._decoder.decode(token.raw_bytes)
            if self._text_offset == 0 and not text.startswith(" "):
                piece = piece.removeprefix(" ")  # the word-start marker that the tokenizer added
            if not token.is_special or text.startswith(piece, self._text_offset):
                self._text_offset += len(piece)
        self._text_offset = len(text)

    def _append_token(self, token: TokenInfo, top: list[TokenInfo]) -> None:
        self._tokens.append(self._token_name(token))
        self._offsets.append(self._text_offset)
        if token.logprob is None:  # nothing precedes the first token of a prompt
            self._logprobs.append(None)
            self._tops.append(None)
        else:
            self._logprobs.append(finite_logprob(token.logprob))
            # The token itself is listed first, and its score wins over that of another with the same spelling.
            scored = [token, *top, token]
            self._tops.append({self._token_name(token): finite_logprob(token.logprob) for token in scored})

    def take_lists(self) -> dict[str, Any]:
        """Return the lists since the last call, and empty them."""
        lists = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self.clear_lists()
        return lists

    def _token_name(self, token: TokenInfo) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token.id}"
        try:
            token.raw_bytes.decode()
        except UnicodeDecodeError:  # part of a character: its bytes keep the names in a map distinct
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw_bytes)
        return token.text


class CompletionChoice:
    """The output of one choice so far."""

    def __init__(self, logprobs: LogprobLists | None):
        self.text: list[str] = []
        self.logprobs = logprobs
        self.ids: list[int] = []
        self.sent_tokens = 0  # tokens sent in the stream so far, counted only for continuous usage
        self.done: ChoiceDone | None = None


class CompletionReply(Reply):
    """A completion request, answered in OpenAI's form."""

    field_names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids", "top_logprobs": "logprobs"}
    reading_rules: ClassVar[ReadingRules] = OPENAI_RULES

    def __init__(self, body: Fields, context: RequestContext):
        self._options = options = applied_options(context, self.reading_rules)
        prompt_list = _read_prompts(body)
        max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 0, MAX_TOKENS)
        extra_members = vllm_members.read_vllm_members(body, context, max_tokens=max_tokens, rules=self.reading_rules)
        prompt_list = _with_suffix(prompt_list, body, context)
        if body.boolean("return_prompt_text", False):
            raise unsupported_member_error(
                body, "return_prompt_text", "The prompt's text in a completion, but by 'echo', is"
            )
        stream = body.boolean("stream", False)
        echo = body.boolean("echo", False)
        logprobs = read_alternatives(body, "logprobs", self.reading_rules, context)
        counts = read_capped_choices(body, len(prompt_list), self.reading_rules)
        usage, self._usage_per_chunk = read_usage_options(body, stream, options)
        self._wants_ids = body.boolean("return_token_ids", False)
        if max_tokens == 0 and not echo:
            raise body.member_error("max_tokens", "may only be 0 when 'echo' is true.")
        self._prompt_alternatives = read_alternatives(body, "prompt_logprobs", self.reading_rules, context)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=prompt_list,
            sampling=read_openai_sampling(body),
            stop_conditions=read_stop_conditions(body, max_tokens, self.reading_rules),
            output_options=OutputOptions(
                logprobs=logprobs,
                logprob_ids=vllm_members.read_logprob_ids(body, logprobs, max_tokens),
                prompt_logprobs=_scored_alternatives(self._prompt_alternatives, logprobs if echo else None),
                echo=echo,
                usage=usage,
                skip_special=body.boolean("skip_special_tokens", True),
                stream_interval=read_stream_interval(body),
                ids=self._wants_ids or self._usage_per_chunk,
            ),
            **counts._asdict(),
            stream=stream,
            banned_words=sampling_members.read_bad_words(body),
            grammar=extra_members.grammar,
            **extra_members.request_members,
        )
        tokens_as_ids = body.boolean("return_tokens_as_token_ids", options.return_tokens_as_token_ids)
        token_name_options = tokens_as_ids, self.request.output_options.skip_special
        self._answer_id = extra_members.client_id or context.unique_id
        self._context = context
        self._choices = [
            CompletionChoice(None if logprobs is None else LogprobLists(logprobs, *token_name_options))
            for _ in range(counts.n * len(prompt_list))
        ]
        self._prompt_ids: dict[int, list[int]] = {}
        self._prompt_scores: dict[int, list[TokenInfo]] = {}
        self._chunk_start = b""
        self._chunk_end = b'],"usage":null}\n\n' if self.request.output_options.usage else b"]}\n\n"

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each piece of output, each end of a choice, and an echoed or scored prompt."""
        parts = []
        for event in events:
            match event:
                case ChoiceDelta() if event.output_part != "tool":
                    index, text, tokens = event.index, event.text, event.tokens
                    choice = self._choices[index]
                    choice.sent_tokens += len(tokens)
                    if choice.logprobs is None and not self._wants_ids:
                        if text:
                            parts.append(self._completion_chunk(index, PLAIN_CHOICE % (index, encode_json(text))))
                    elif text or tokens:
                        parts.append(self._text_chunk(index, text, tokens))
                case ChoiceDone():
                    choice_ = self._choice_members(event.index, "", event) | self._id_members(event.index, [])
                    parts.append(self._completion_chunk(event.index, encode_json(choice_)))
                case PromptAccepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case PromptScored() if self.request.output_options.echo or self._prompt_alternatives is not None:
                    parts += [self._prompt_chunk(index, event) for index in self.request.prompt_choices(event.prompt)]
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        envelope = self._completion_envelope([], usage)
        return data_event(envelope | metrics_member(self, self._options, usage)) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event and the ``[DONE]`` mark."""
        return openai_failure_events(error)

    def _text_chunk(self, index: int, text: str, tokens: list[TokenInfo]) -> bytes:
        logprobs = self._choices[index].logprobs
        if logprobs is not None:
            logprobs.add_output(tokens)
        choice = self._choice_members(index, text, None, logprobs) | self._id_members(index, tokens)
        return self._completion_chunk(index, encode_json(choice))

    def _prompt_chunk(self, index: int, prompt: PromptScored) -> bytes:
        """Return the first chunk of a choice: the requested text and scores of its prompt."""
        logprobs = self._choices[index].logprobs
        if logprobs is not None and self.request.output_options.echo:
            logprobs.add_prompt(prompt.tokens, prompt.text)
        text = prompt.text if self.request.output_options.echo else ""
        choice = self._choice_members(index, text, None, logprobs) | self._id_members(index, [])
        if self._prompt_alternatives is not None:
            choice["prompt_logprobs"] = prompt_logprob_maps(prompt.tokens, self._prompt_alternatives)
        return self._completion_chunk(index, encode_json(choice))

    def _completion_chunk(self, index: int, choice: bytes) -> bytes:
        if not self._chunk_start:  # the model's name is final only after the server has resolved it
            self._chunk_start = choice_event_start(self._completion_envelope([]))
        if self._usage_per_chunk:
            prompt = self._prompt_ids.get(index // self.request.n, ())
            usage = encode_json(running_usage(len(prompt), self._choices[index].sent_tokens))
            return self._chunk_start + choice + b'],"usage":' + usage + b"}\n\n"
        return self._chunk_start + choice + self._chunk_end

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text and tokens of these events by choice; an echoed prompt begins each of its choices."""
        for event in events:
            match event:
                case ChoiceDelta(index, text, tokens=tokens) if event.output_part != "tool":
                    choice = self._choices[index]
                    choice.text.append(text)
                    choice.ids += [token.id for token in tokens]
                    if choice.logprobs is not None:
                        choice.logprobs.add_output(tokens)
                case ChoiceDone():
                    self._choices[event.index].done = event
                case PromptAccepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case PromptScored():
                    self._prompt_scores[event.prompt] = event.tokens
                    if self.request.output_options.echo:
                        self._prepend_prompt(event)

    def _prepend_prompt(self, event: PromptScored) -> None:
        for index in self.request.prompt_choices(event.prompt):
            choice = self._choices[index]
            choice.text.append(event.text)
            if choice.logprobs is not None:
                choice.logprobs.add_prompt(event.tokens, event.text)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON, with the prompts' ids and log-probabilities if requested."""
        choices = []
        for index, state in enumerate(self._choices):
            assert state.done is not None
            choice = self._choice_members(index, "".join(state.text), state.done, state.logprobs)
            scores = self._prompt_scores.get(index // self.request.n)
            if self._prompt_alternatives is not None and scores is not None:
                choice["prompt_logprobs"] = prompt_logprob_maps(scores, self._prompt_alternatives)
            if self._wants_ids:
                choice["token_ids"] = state.ids
                choice["prompt_token_ids"] = self._prompt_ids.get(index // self.request.n)
            choices.append(choice)
        envelope = self._completion_envelope(choices, usage)
        return encode_json(envelope | metrics_member(self, self._options, usage))

    # -- both

    def _choice_members(
        self, index: int, text: str, done: ChoiceDone | None, logprobs: LogprobLists | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.take_lists(),
            "finish_reason": None if done is None else FINISH_REASONS[done.reason],
        }
        if done is not None:
            choice["stop_reason"] = done.stop
        return choice

    def _id_members(self, index: int, tokens: list[TokenInfo]) -> dict[str, Any]:
        """Return the token ids of a chunk, and with the first chunk of a choice the prompt's."""
        if not self._wants_ids:
            return {}
        members: dict[str, Any] = {"token_ids": [token.id for token in tokens]}
        choice = self._choices[index]
        if not choice.ids:
            choice.ids = [-1]  # marks that the prompt's ids were sent
            members["prompt_token_ids"] = self._prompt_ids.get(index // self.request.n)
        return members

    def _completion_envelope(self, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"cmpl-{self._answer_id}",
            "object": "text_completion",
            "created": self._context.created,
            "model": self.request.model,
            "system_fingerprint": self._context.fingerprint,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = openai_usage(usage)
        return envelope


class StrictCompletionReply(CompletionReply):
    """A completion request with the limits of OpenAI's own service."""

    reading_rules = STRICT_OPENAI_RULES

    def __init__(self, body: Fields, context: RequestContext):
        body.integer("logprobs", None, 0, MAX_STRICT_LOGPROBS)
        best_of = body.integer("best_of", None, 0, MAX_STRICT_BEST_OF)
        super().__init__(body, context)
        if self.request.stream and best_of is not None and best_of > self.request.n:
            raise body.member_error("best_of", "the best of several answers cannot be streamed.")


def _with_suffix(prompt_list: list[Prompt], body: Fields, context: RequestContext) -> list[Prompt]:
    """Return the prompts with the text that follows the missing middle. Raises BadRequest."""
    suffix = body.string("suffix", "")
    if not suffix:
        return prompt_list
    if "insert" not in context.abilities:
        raise unsupported_member_error(body, "suffix", "With this model, filling in before a suffix is")
    if body.boolean("echo", False):
        raise body.member_error("suffix", "cannot be used together with 'echo'.")
    if not all(isinstance(prompt, TextPrompt) for prompt in prompt_list):
        raise body.member_error("suffix", "needs a 'prompt' that is text.")
    return [msgspec.structs.replace(prompt, suffix=suffix) for prompt in prompt_list]


def _read_prompts(body: Fields) -> list[Prompt]:
    if body.has_value("prompt_embeds") and not body.has_value("prompt"):
        raise unsupported_member_error(body, "prompt_embeds", "Embeddings as a prompt are")
    return prompts.read_prompts(body, "prompt", cap=MAX_PROMPTS)


def _scored_alternatives(prompt_logprobs: int | None, echoed_logprobs: int | None) -> int | None:
    """Return how many alternatives the prompt's tokens are scored with: as many as an option asks for, -1: all.

    ``prompt_logprobs``: for the prompt itself; ``echoed_logprobs``: for an answer that repeats the prompt.
    """
    if echoed_logprobs is None:
        return prompt_logprobs
    return -1 if -1 in (echoed_logprobs, prompt_logprobs) else max(echoed_logprobs, prompt_logprobs or 0)
