"""Handlers between text and tokens, and the description of the tokenizer. They need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.admin_requests import DetokenizeRequest, TokenizeRequest, TokenizeResult
from parley.dialects.route import Route, model_in_body
from parley.errors import InvalidValue, NotFound
from parley.serving.handlers.visible_models import allowed_model
from parley.serving.keys.scopes import check_key_name
from parley.serving.media.request_media import prompt_media
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.serving.served_model import ServedModel
from parley.text.context_edits import prepare_edited
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChatPrompt, ProcessedMedia, Prompt, TextPrompt
from parley.web.exchange import Exchange
from parley.web.offload import OFFLOAD_SIZE, to_thread_if_large, to_thread_if_slow

HUGE_TEXT = 1 << 20  # characters; longer texts are tokenized one at a time, so that they leave threads to others
MAX_TOKENS_COUNTED = 1 << 20  # most tokens of a text to tokenize, or twice the model's context if that is more


async def handle_tokenize(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Tokenize a prompt."""
    registry.require_any_ready()
    body = await exchange.read_body()
    if route.refuse_headers is not None and (refusal := route.refuse_headers(exchange.headers)) is not None:
        await exchange.send_answer(refusal)
        return
    tokenize_request = await exchange.to_thread_if_large(
        len(body), partial(_read_tokenize_request, registry, route, exchange, body)
    )
    writer = tokenize_request.writer or route.writer
    assert writer is not None
    tenant = exchange.tenant
    model = registry.find_model(tokenize_request.model, tenant, registry.implied_model(route, tenant))
    check_key_name(tenant, model, tokenize_request.model)
    model.require_ready()
    prompt = tokenize_request.prompt
    processed: Sequence[ProcessedMedia] = ()
    if media := prompt_media(prompt):
        lease = await exchange.while_connected(model.load_media(media, exchange.tenant))
        processed = lease.items
        lease.release()  # tokens need the replacements alone
    if isinstance(prompt, ChatPrompt):
        exchange.field_names = {"prompt": "messages"}
    is_one_text = isinstance(prompt, TextPrompt) and not tokenize_request.further_prompts
    size = len(prompt.text) if isinstance(prompt, TextPrompt) and is_one_text else len(body)
    if model.text_pipeline.may_be_slow:
        size = max(size, OFFLOAD_SIZE + 1)
    work = partial(_tokenize_and_encode, model, tokenize_request, writer, processed)
    if size > HUGE_TEXT:
        answer = await exchange.while_connected(
            _run_alone(registry.huge_text_lock, partial(to_thread_if_large, size, work))
        )
    elif size > OFFLOAD_SIZE:
        answer = await exchange.to_thread_if_large(size, work)
    else:
        answer = await exchange.while_connected(to_thread_if_slow(work))
    await exchange.send_response(answer)


def _read_tokenize_request(registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes) -> TokenizeRequest:
    """Read a body with the facts about the model that it names; an unknown name is reported after other mistakes."""
    assert route.reader is not None
    tenant = exchange.tenant
    implied_model, name = registry.implied_model(route, tenant), model_in_body(body)
    model = registry.get_model(name, implied_model) or implied_model
    check_key_name(tenant, model, name)
    tokenize_request: TokenizeRequest = route.reader(body, request_context(registry, model, exchange))
    return tokenize_request


async def _run_alone(lock: asyncio.Lock, work: Callable[[], Awaitable[bytes]]) -> bytes:
    async with lock:
        return await work()


def _tokenize_and_encode(
    model: ServedModel,
    tokenize_request: TokenizeRequest,
    writer: Callable[[TokenizeResult], bytes],
    media: Sequence[ProcessedMedia],
) -> bytes:
    result = _tokenize_prompt(model, tokenize_request, tokenize_request.prompt, media)
    further = [_tokenize_prompt(model, tokenize_request, text, ()) for text in tokenize_request.further_prompts]
    return writer(replace(result, further_results=further) if further else result)


def _tokenize_prompt(
    model: ServedModel, tokenize_request: TokenizeRequest, prompt: Prompt, media: Sequence[ProcessedMedia]
) -> TokenizeResult:
    pipeline, context_length = model.text_pipeline, model.model_info.max_model_len
    if tokenize_request.pooling is not None and isinstance(prompt, TextPrompt):
        prompt = pipeline.apply_embedding_prompt(prompt, tokenize_request.pooling)
    most_tokens = max(MAX_TOKENS_COUNTED, 2 * context_length)
    if isinstance(prompt, ChatPrompt) and prompt.edits:

        def prepare(chat: ChatPrompt, kept_media: Sequence[ProcessedMedia]) -> PreparedPrompt:
            return PreparedPrompt(pipeline.tokenize_prompt(chat, False, most_tokens, kept_media)[1])

        edited = prepare_edited(prompt, media, prepare)
        token_ids = edited.prepared.token_ids
        return TokenizeResult(token_ids, None, context_length, original_tokens=edited.original_tokens)
    text, token_ids, spans = pipeline.tokenize_prompt(prompt, tokenize_request.with_spans, most_tokens, media)
    if tokenize_request.last_tokens is not None:
        first = max(0, len(token_ids) - tokenize_request.last_tokens)
        token_ids, spans = token_ids[first:], spans[first:]
    pieces = None
    if tokenize_request.with_pieces:
        pieces = [pipeline.tokenizer.token_str(token_id) or "" for token_id in token_ids]
    elif tokenize_request.with_texts:
        pieces = [pipeline.tokenizer.decode([token_id], False) for token_id in token_ids]
    return TokenizeResult(token_ids, pieces, context_length, text if tokenize_request.with_spans else "", spans)


async def handle_detokenize(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Decode token ids to text."""
    registry.require_any_ready()
    body = await exchange.read_body()
    assert route.reader is not None and route.writer is not None
    detokenize_request: DetokenizeRequest = await exchange.to_thread_if_large(len(body), partial(route.reader, body))
    tenant = exchange.tenant
    model = registry.find_model(detokenize_request.model, tenant, registry.implied_model(route, tenant))
    check_key_name(tenant, model, detokenize_request.model)
    model.require_ready()
    decode = partial(_decode_texts, model.text_pipeline.tokenizer, detokenize_request)
    size = 4 * sum(map(len, (detokenize_request.token_ids, *detokenize_request.further_ids)))
    texts = await exchange.to_thread_if_large(size, decode)
    await exchange.send_response(route.writer(*texts))


def _decode_texts(tokenizer: Tokenizer, detokenize_request: DetokenizeRequest) -> list[str]:
    """Return the text of each list of ids. Raises InvalidValue for an unknown id, unless those are ignored."""
    vocabulary, texts = tokenizer.vocab_size, []
    for ids in (detokenize_request.token_ids, *detokenize_request.further_ids):
        known_ids = [token_id for token_id in ids if token_id < vocabulary]
        if len(known_ids) < len(ids) and not detokenize_request.ignore_unknown:
            raise InvalidValue(f"Token id {max(ids)} is not in the vocabulary of {vocabulary} tokens.", field="tokens")
        texts.append(tokenizer.decode(known_ids, detokenize_request.skip_special))
    return texts


async def handle_tokenizer(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the tokenizer's configuration and the chat template, which evaluation tools read."""
    assert route.writer is not None
    if not registry.options.tokenizer_info:
        raise NotFound("The tokenizer configuration is not served. Start the server with --tokenizer-info to serve it.")
    config: dict[str, Any] = {}
    model = allowed_model(registry, route, exchange.tenant)
    path = Path(model.settings.model) / "tokenizer_config.json"
    if path.is_file():
        config = msgspec.json.decode(path.read_bytes())
    await exchange.send_response(
        route.writer(config | {"chat_template": model.text_pipeline.template.all_sources or None})
    )
