"""Requests that need no engine: prompts, answered with the tokens that the engine would get, and answers
that another engine gave as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from parley.dialects.render_reply import AnswerRenderer, ChunkRenderer, PromptRenderer, RenderedPrompt
from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.errors import InvalidValue
from parley.serving.engine_requests import check_request, prepare_engine_requests, resolve_model_name
from parley.serving.keys.scopes import check_key_models
from parley.serving.media.request_media import prompt_media
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import read_generation_body
from parley.text.answer_choice import AnswerChoice
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.text_pipeline import TextPipeline
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    EngineOutput,
    EngineRequest,
    Event,
    KeptSide,
    Prompt,
    TextPrompt,
    TokenInfo,
    Usage,
)
from parley.web.exchange import Exchange
from parley.web.offload import OFFLOAD_SIZE

Spans = list[tuple[int, int]]


async def handle_render(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer with the prompts of a generating request as tokens, or with the answer that tokens mean. Every error in
    the request is reported as usual."""
    registry.require_any_ready()
    body = await exchange.read_body()
    model, reply = await exchange.to_thread_if_large(
        len(body), partial(read_generation_body, registry, route, exchange, body)
    )
    if isinstance(reply, Answer):
        await exchange.send_answer(reply)
        return
    assert isinstance(reply, PromptRenderer | AnswerRenderer | ChunkRenderer)
    exchange.adopt_reply(reply)
    model.require_ready()
    request = reply.request
    resolve_model_name(model, request)
    check_key_models(exchange.tenant, model.names if request.adapter is None else (request.adapter,))
    check_request(model, request)
    prepared_prompts = await exchange.while_connected(prepare_engine_requests(model, request, exchange.tenant))
    size = OFFLOAD_SIZE if model.text_pipeline.may_be_slow else 0
    size += 8 * sum(len(prepared.token_ids) for prepared, _ in prepared_prompts)
    if isinstance(reply, PromptRenderer):
        work = partial(_render_prompts, model.text_pipeline, reply, prepared_prompts)
    else:
        size += 8 * sum(len(output.token_ids) for output in reply.outputs)
        prompts, vocabulary = [prepared for prepared, _ in prepared_prompts], model.model_info.vocab_size
        if isinstance(reply, AnswerRenderer):
            work = partial(_render_answer, model.text_pipeline, reply, prompts, vocabulary)
        else:
            work = partial(_render_chunk, model.text_pipeline, reply, prompts[0], vocabulary)
    await exchange.send_response(await exchange.to_thread_if_large(size, work))


def _render_answer(
    pipeline: TextPipeline, reply: AnswerRenderer, prepared_prompts: list[PreparedPrompt], vocabulary: int
) -> bytes:
    """Return the answer to prompts. ``vocabulary``: of the model, whose last tokens may have no text. Raises
    InvalidValue for tokens that it lacks."""
    request, usage = reply.request, Usage(prompt_tokens=reply.prompt_tokens)
    for number, prepared in enumerate(prepared_prompts):
        for index in request.prompt_choices(number):
            output = reply.outputs[index]
            _check_vocabulary(output, vocabulary)
            choice = AnswerChoice(request, index, pipeline.tokenizer, prepared, details=request.output_options.ids)
            reply.add_events(choice.push_output(output))
            usage.completion_tokens += len(output.token_ids)
    return reply.render_body(usage)


def _render_chunk(pipeline: TextPipeline, reply: ChunkRenderer, prepared: PreparedPrompt, vocabulary: int) -> bytes:
    """Return the chunk of a streamed answer, after the chunks before it have been read. Raises InvalidValue as
    above."""
    request, frames, tokens = reply.request, b"", list[TokenInfo]()
    choice = AnswerChoice(request, 0, pipeline.tokenizer, prepared, details=request.output_options.ids)
    for output in reply.outputs:
        _check_vocabulary(output, vocabulary)
        events = choice.push_output(output)
        tokens += _shown_tokens(events)
        frames = reply.render_chunk(events)
    if request.output_options.logprobs is not None:  # a token whose text is not known yet has a score
        tokens += _shown_tokens(choice.push_output(EngineOutput("", 0, finish_reason="length")))
    return reply.render_answer(frames, tokens)


def _shown_tokens(events: Iterable[Event]) -> list[TokenInfo]:
    return [token for event in events if isinstance(event, ChoiceDelta) for token in event.tokens]


def _check_vocabulary(output: EngineOutput, vocabulary: int) -> None:
    listed = max((max(score.top_ids, default=0) for score in output.scores or ()), default=0)
    if (largest := max(max(output.token_ids, default=0), listed)) >= vocabulary:
        raise InvalidValue(f"Token id {largest} is not in the vocabulary of {vocabulary} tokens.", field="token_ids")


def _render_prompts(
    pipeline: TextPipeline, reply: PromptRenderer, prepared_prompts: list[tuple[PreparedPrompt, EngineRequest]]
) -> bytes:
    rendered_prompts = []
    for prompt, (prepared, engine_request) in zip(reply.request.prompts, prepared_prompts, strict=True):
        ids = prepared.token_ids
        spans = _find_spans(pipeline, prompt, ids, reply.request.kept_side) if reply.wants_spans else None
        ended = pipeline.find_reasoning_ended(prompt, prepared)
        rendered_prompts.append(RenderedPrompt(ids, engine_request.max_tokens, ended, spans))
    return reply.render_prompts(rendered_prompts)


def _find_spans(pipeline: TextPipeline, prompt: Prompt, token_ids: list[int], kept_side: KeptSide) -> Spans | None:
    """Return the spans of tokens' characters in the whole text of their prompt; None if it has no text, or media.

    ``token_ids``: of the prompt, perhaps without the part of a too long text that is not on ``kept_side``.
    """
    if not isinstance(prompt, TextPrompt | ChatPrompt) or prompt_media(prompt):
        return None
    _, ids, spans = pipeline.tokenize_prompt(prompt)
    first = len(ids) - len(token_ids) if kept_side == "tail" else 0
    is_part = first >= 0 and ids[first : first + len(token_ids)] == token_ids
    return spans[first : first + len(token_ids)] if is_part else None
