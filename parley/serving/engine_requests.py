"""Prepares a request for the engine: one engine request per prompt, with tokens, output limit, grammar and seed.

Every error in a request is reported here, before anything is queued. Knows no engine, no events and no API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count

import msgspec

from parley.core.media.placeholders import are_known_tokens
from parley.core.rope_positions import largest_position
from parley.errors import (
    BadRequest,
    ContextLength,
    InvalidValue,
    NoTokens,
    TooLarge,
    UnknownModel,
    UnknownToken,
    UnknownTokenIds,
    excerpt,
)
from parley.serving import beam_limits
from parley.serving.engine_features import check_engine_bounds, check_engine_features
from parley.serving.logprob_limits import (
    check_answer_logprobs,
    engine_alternatives,
    engine_alternatives_count,
    logprob_output_limit,
)
from parley.serving.media.request_media import check_prompt_is_whole, media_by_prompt
from parley.serving.served_model import ServedModel
from parley.serving.workers.grammar_workers import GRAMMAR_WORKERS
from parley.text.context_edits import asks_for_summary, prepare_edited, summarized_messages
from parley.text.oldest_turns import fit_chat
from parley.text.prepared_prompt import AnswerAfterSummary, PreparedPrompt
from parley.text.prompt_size import exceeds_size, text_characters
from parley.text.tokens.prediction import PredictedTokens
from parley.types import (
    BATCH_PRIORITY,
    TOKEN_TASKS,
    ChatPrompt,
    EngineRequest,
    ModelInfo,
    OutputOptions,
    PoolingTask,
    ProcessedMedia,
    Prompt,
    Request,
    StopConditions,
    SummarizeContext,
    Tenant,
    TokensPrompt,
)
from parley.web.offload import OFFLOAD_SIZE, run_in_thread, to_thread_if_slow

MAX_PRIORITY = (1 << 63) - 1
# Keep engine ids unique: a retried request may arrive while the engine still runs its first attempt.
ATTEMPT_NUMBERS = count()
MAX_SUMMARY_TOKENS = 4096  # of a summary before the answer
SUMMARY_SHARE_DIVISOR = 4  # such a summary has at most the context's length divided by this
MAX_TOKEN_VECTOR_NUMBERS = 1 << 23  # numbers of all tokens' vectors in one answer; as JSON they take 160 MB


def resolve_model_name(model: ServedModel, request: Request) -> None:
    """Replace the model's name in a request by the one that its answer carries.

    Where that is the name of an adapter, and the request names no other, the request uses that adapter.
    """
    request.model = model.answer_name(request.model)
    if request.adapter is None and request.model in model.adapters:
        request.adapter = request.model


def check_request(model: ServedModel, request: Request) -> None:
    """Check all that can be known before prompts are tokenized and media are loaded. Raises BadRequest, UnknownModel.

    A beam search of width 1 is replaced in ``request`` by options that express it.
    """
    check_adapter(model, request)
    info = model.model_info
    check_engine_features(request, info)
    beam_limits.check_beam_search(request, model.settings.max_batch)
    _check_token_ids(request, info)
    _check_text_size(request, model.options.body_limit)


async def prepare_engine_requests(
    model: ServedModel, request: Request, tenant: Tenant, media: Sequence[ProcessedMedia] = ()
) -> list[tuple[PreparedPrompt, EngineRequest]]:
    """Prepare each prompt of a checked request and build its engine request. Raises BadRequest.

    ``media``: the processed media of all prompts, in order. Banned words are replaced in ``request`` by their tokens.
    """
    size = 64 * len(request.banned_words) + len(request.prediction)
    size += sum(len(item.replacement) for item in media)
    needs_thread = (
        model.text_pipeline.may_be_slow or size > OFFLOAD_SIZE or exceeds_size(request.prompts, OFFLOAD_SIZE - size)
    )
    grammars = await _compile_grammars(model, request, tenant)
    prepare = partial(_prepare_prompts, model, request, media)
    prompts = await run_in_thread(prepare) if needs_thread else await to_thread_if_slow(prepare)
    return [
        (prepared, _build_engine_request(model, request, number, prepared, max_tokens, grammars[number], tenant))
        for number, (prepared, max_tokens) in enumerate(prompts)
    ]


async def prepare_answer(
    model: ServedModel, request: Request, tenant: Tenant, answer: AnswerAfterSummary, summary: str
) -> tuple[PreparedPrompt, EngineRequest]:
    """Prepare the prompt of the answer that follows a summary, and build its engine request. Raises BadRequest.

    ``summary``: if it is empty, the conversation stays as it is.
    """
    messages = summarized_messages(answer.chat, answer.heading, summary)
    chat = msgspec.structs.replace(answer.chat, messages=messages) if summary else answer.chat
    request = msgspec.structs.replace(request, prompts=[chat])
    if summary:
        ((prepared, engine_request),) = await prepare_engine_requests(model, request, tenant)
        return prepared, engine_request
    (grammar,) = await _compile_grammars(model, request, tenant)
    max_tokens = _output_limit(model, request, answer.whole)
    return answer.whole, _build_engine_request(model, request, 0, answer.whole, max_tokens, grammar, tenant)


def summary_request(request: Request, max_tokens: int) -> Request:
    """Return a request for a summary before the answer: what ends or describes the answer does not concern it."""
    budget = None if request.thinking_budget is None else min(request.thinking_budget, max_tokens // 2)
    return msgspec.structs.replace(
        request,
        stop_conditions=StopConditions(max_tokens=max_tokens, reserved_tokens=1),
        output_options=OutputOptions(),
        thinking_budget=budget,
    )


def reserved_counts(
    request: Request, prepared_prompts: Sequence[tuple[PreparedPrompt, EngineRequest]]
) -> tuple[int, int | None]:
    """Return the tokens of the prompts, and the largest number that all choices may have; None if the request names no
    limit. An answer after a summary counts as if the summary replaced nothing."""
    answers = [prepared.answer for prepared, _ in prepared_prompts if prepared.answer is not None]
    prompt_tokens = sum(len(engine_request.token_ids) for _, engine_request in prepared_prompts)
    prompt_tokens += sum(len(answer.whole.token_ids) for answer in answers)
    max_tokens = request.stop_conditions.max_tokens
    if max_tokens is None and request.pooling is None:
        return prompt_tokens, None
    return prompt_tokens, (max_tokens or 0) * len(answers) + sum(
        engine_request.max_tokens * engine_request.n
        for _, engine_request in prepared_prompts
        if engine_request.pooling is None
    )


def check_adapter(model: ServedModel, request: Request) -> None:
    """Raise UnknownModel if the request names an adapter that the model does not have."""
    name, adapters = request.adapter, model.adapters
    if name is not None and name not in adapters:
        raise UnknownModel(f"There is no adapter {excerpt(name)}.", name=name, served=list(adapters), field="adapter")


def _global_priority(request: Request, tenant: Tenant) -> int:
    """Return the priority among the requests of all tenants; a lower number runs sooner."""
    priority = request.priority if tenant.has_global_priority else tenant.priority
    return min(max(priority, 0) + BATCH_PRIORITY, MAX_PRIORITY) if request.in_batch else priority


def _build_engine_request(
    model: ServedModel,
    request: Request,
    number: int,
    prepared: PreparedPrompt,
    max_tokens: int,
    grammar: str,
    tenant: Tenant,
) -> EngineRequest:
    """Build the engine request of prompt ``number``."""
    if prepared.answer is not None:
        request = summary_request(request, max_tokens)
    pipeline, vocabulary = model.text_pipeline, model.model_info.vocab_size
    sampling, stop_conditions, output_options = request.sampling, request.stop_conditions, request.output_options
    seed = sampling.seed if sampling.seed is not None else _derive_seed(f"{request.id} {number}")
    budget = request.thinking_budget
    # The text of an answer to tokens is never parsed, but its client knows the conversation that the tokens are.
    plain = output_options.unparsed and not isinstance(request.prompts[number], TokensPrompt)
    return EngineRequest(
        id=f"{request.id}-{number}-{next(ATTEMPT_NUMBERS)}",
        token_ids=prepared.token_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed & (2**64 - 1),
        n=request.choices_per_prompt,
        min_tokens=stop_conditions.min_tokens,
        stop_ids=sorted({*stop_conditions.ids, *(() if stop_conditions.ignore_eos else pipeline.tokenizer.eos_ids)}),
        logprobs=engine_alternatives(request, vocabulary),
        prompt_logprobs=engine_alternatives_count(output_options.prompt_logprobs, vocabulary),
        cache_salt=_tenant_salt(request.cache_salt, model.options.prefix_owner(tenant)),
        token_costs=output_options.token_costs,
        pooling=request.pooling,
        grammar=pipeline.wrap_with_reasoning(grammar, prepared, plain)
        if not asks_for_summary(prepared.applied_edits)
        else "",
        reasoning_limit=None if budget is None else pipeline.reasoning_limit(prepared, budget),
        priority=_global_priority(request, tenant),
        tenant=tenant.id,
        tenant_priority=0 if tenant.has_global_priority else request.priority,
        beam=request.beam,
        adapter=request.adapter or model.find_media_adapter(prepared.media),
        prediction=prepared.predicted.token_ids if prepared.predicted is not None else [],
        logprob_ids=output_options.logprob_ids,
        media=prepared.media,
        second_text_start=prepared.second_text_start,
    )


def _tenant_salt(cache_salt: str, owner: str) -> str:
    """Return the engine's salt for the prefixes of ``owner``, which no other tenant's salt equals; the id of an owner
    has a fixed length."""
    return f"{owner}\0{cache_salt}" if owner else cache_salt


def _derive_seed(seed_text: str) -> int:
    """Return a 63-bit seed that looks random but is the same on every instance that computes this request."""
    return int.from_bytes(blake2b(seed_text.encode(), digest_size=8).digest()) >> 1


async def _compile_grammars(model: ServedModel, request: Request, tenant: Tenant) -> list[str]:
    """Return the grammar that the answer to each prompt must follow, in the engine's format. Raises InvalidValue."""
    pipeline, grammar, prompts = model.text_pipeline, request.grammar, request.prompts
    has_chat = any(isinstance(prompt, ChatPrompt) for prompt in prompts)  # plain prompts all have the same grammar
    if grammar is None and not has_chat:
        return [""] * len(prompts)
    grammars = [
        await GRAMMAR_WORKERS.compile_answer_grammar(pipeline, prompt, grammar, tenant.id)
        for prompt in (prompts if has_chat else prompts[:1])
    ]
    return grammars if has_chat else grammars * len(prompts)


def _prepare_prompts(
    model: ServedModel, request: Request, media: Sequence[ProcessedMedia]
) -> list[tuple[PreparedPrompt, int]]:
    """Tokenize each prompt and compute how many tokens may follow it. Raises BadRequest."""
    pipeline, info, prepared_prompts = model.text_pipeline, model.model_info, []
    _check_room_for_text(model, request)
    predicted = pipeline.prepare_prediction(request.prediction, info.max_model_len)
    places = request.prompt_places or [""] * len(request.prompts)
    for prompt, items, place in zip(request.prompts, media_by_prompt(request, media), places, strict=True):
        prepare = partial(_prepare_prompt, model, request, items, predicted)
        try:
            if request.on_overflow == "oldest_turns" and isinstance(prompt, ChatPrompt) and not items:
                prepared_prompts.append(fit_chat(prompt, prepare))
            else:
                prepared_prompts.append(prepare(prompt))
        except BadRequest as error:
            if place:
                error.name_place(place)
            raise
    check_answer_logprobs(request, info, prepared_prompts)
    _check_token_vectors(request, info, prepared_prompts)
    if request.banned_words:
        request.sampling = msgspec.structs.replace(
            request.sampling, banned=pipeline.word_token_ids(request.banned_words)
        )
        check_engine_bounds(request, info)  # a word may have several spellings in tokens
    return prepared_prompts


def _prepare_prompt(
    model: ServedModel,
    request: Request,
    items: Sequence[ProcessedMedia],
    predicted: PredictedTokens | None,
    prompt: Prompt,
) -> tuple[PreparedPrompt, int]:
    """Tokenize a prompt, and compute how many tokens may follow it. Raises BadRequest."""
    context_length, max_prompt = _context_length(model.model_info, request), model.options.max_prompt
    keeps_tokens = request.on_overflow in ("head", "tail")
    prepare = partial(
        model.text_pipeline.prepare_prompt,
        max_prompt_tokens=request.max_prompt_tokens,
        kept_side=request.kept_side,
        counted_tokens=request.counted_tokens,
        pooling=request.pooling,
    )
    edits = prompt.edits if isinstance(prompt, ChatPrompt) else []
    # What is truncated or cleared may be of any length before that. The question for a summary shortens nothing.
    may_shorten = (keeps_tokens and not items) or not all(isinstance(edit, SummarizeContext) for edit in edits)
    early_limit = None if may_shorten else context_length
    if isinstance(prompt, ChatPrompt) and edits:
        edited = prepare_edited(prompt, items, lambda chat, kept_items: prepare(chat, early_limit, media=kept_items))
        prepared = replace(edited.prepared, applied_edits=edited.applied)
    else:
        prepared = prepare(prompt, early_limit, media=items)
    if items:
        check_prompt_is_whole(request, len(prepared.token_ids))
    if max_prompt is not None or keeps_tokens:
        prepared = _truncate_prompt(request, prepared, min(max_prompt or context_length, context_length - 1))
    if predicted is not None:
        prepared = replace(prepared, predicted=predicted)
    if prepared.answer is None:
        return prepared, _output_limit(model, request, prepared)
    _output_limit(model, request, prepared.answer.whole)  # it may be all that the answer can follow
    most = min(MAX_SUMMARY_TOKENS, context_length // SUMMARY_SHARE_DIVISOR, prepared.answer.spared_tokens)
    return prepared, _output_limit(model, summary_request(request, max(1, most)), prepared)


def _context_length(info: ModelInfo, request: Request) -> int:
    """Return how many tokens a prompt and its output may have together."""
    return min(info.max_model_len, request.context_limit or info.max_model_len)


def _context_owner(request: Request) -> str:
    return "This model's" if request.context_limit is None else "This request's"


def _truncate_prompt(request: Request, prepared: PreparedPrompt, max_prompt: int) -> PreparedPrompt:
    """Truncate a prompt to ``max_prompt`` tokens, if the request allows it. Raises ContextLength."""
    token_ids = prepared.token_ids
    if len(token_ids) <= max_prompt:
        return prepared
    if request.on_overflow not in ("head", "tail") or prepared.media:
        raise ContextLength(
            f"The prompt has {len(token_ids)} tokens, but at most {max_prompt} are allowed here. Shorten the prompt.",
            field="prompt",
            limit=max_prompt + 1,
            prompt=len(token_ids),
        )
    return replace(
        prepared, token_ids=token_ids[:max_prompt] if request.on_overflow == "head" else token_ids[-max_prompt:]
    )


def _output_limit(model: ServedModel, request: Request, prepared: PreparedPrompt) -> int:
    """Return how many tokens may be generated after the prompt. Raises ContextLength, InvalidValue."""
    info, stop_conditions, token_ids = model.model_info, request.stop_conditions, prepared.token_ids
    context_length = _context_length(info, request)
    if not token_ids:
        raise NoTokens("The prompt is empty: it has no tokens.", field="prompt")
    is_beyond = max(token_ids) >= info.vocab_size  # as tokens that stand for embeddings may be
    if is_beyond and not are_known_tokens(token_ids, prepared.media, info.vocab_size):
        message = f"Token id {max(token_ids)} is out of vocabulary: there are {info.vocab_size} tokens."
        raise UnknownToken(message, token_id=max(token_ids), field="prompt")
    # The positions of a video may run ahead of its tokens.
    prompt_positions = max(len(token_ids), largest_position(prepared.media, len(token_ids)) + 1)
    context_room = context_length - prompt_positions
    min_room = (
        stop_conditions.max_tokens if stop_conditions.max_tokens is not None else max(1, stop_conditions.min_tokens)
    )
    if stop_conditions.reserved_tokens is not None:
        min_room = min(min_room, stop_conditions.reserved_tokens)
    if request.pooling is not None:
        min_room = 0
    if min_room > context_room:
        names_max_tokens = stop_conditions.max_tokens is not None and request.pooling is None
        request_part = f", and {min_room} more were requested" if names_max_tokens else ""
        raise ContextLength(
            f"{_context_owner(request)} maximum context length is {context_length} tokens. "
            f"The prompt has {prompt_positions} tokens{request_part}. "
            f"Shorten the prompt{' or ask for fewer tokens' if request.pooling is None else ''}.",
            field="prompt",
            limit=context_length,
            prompt=prompt_positions,
            requested=min_room if names_max_tokens else None,
        )
    output_limits = (
        stop_conditions.max_tokens,
        model.options.max_output,
        _engine_output_limit(info),
        beam_limits.beam_output_limit(request, info, len(token_ids), min_room),
        logprob_output_limit(request),
    )
    return min([context_room, *[limit for limit in output_limits if limit is not None]])


def _engine_output_limit(info: ModelInfo) -> int | None:
    """Return the largest output in tokens that the engine accepts; None for any."""
    bound = info.bounds.get("max_tokens")
    return None if bound is None or bound[1] == math.inf else int(bound[1])


def _check_token_ids(request: Request, info: ModelInfo) -> None:
    """Check that the token ids in the options are in the vocabulary. Raises UnknownTokenIds."""
    ids_by_field = {
        "logit_bias": request.sampling.logit_bias,
        "stop_ids": request.stop_conditions.ids,
        "allowed_token_ids": request.sampling.allowed,
        "logprob_token_ids": request.output_options.logprob_ids,
    }
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt) and prompt.rendered_ids:
            ids_by_field["kv_transfer_params.prompt_token_ids"] = prompt.rendered_ids
    for field, token_ids in ids_by_field.items():
        if token_ids and (highest_id := max(token_ids)) >= info.vocab_size:
            message = f"Token id {highest_id} is not in the vocabulary of {info.vocab_size} tokens."
            unknown_ids = [token_id for token_id in token_ids if token_id >= info.vocab_size]
            raise UnknownTokenIds(message, token_ids=unknown_ids, vocabulary=info.vocab_size, field=field)


def _check_room_for_text(model: ServedModel, request: Request) -> None:
    """Check that the window of a request for vectors holds more than the marks around a text. Raises ContextLength."""
    window, cut = request.context_limit, request.max_prompt_tokens
    if request.pooling is None or window is None or cut is None:
        return
    mark_count = sum(map(len, model.text_pipeline.tokenizer.special_around))
    if cut <= mark_count:
        raise ContextLength(
            f"A window of {window} tokens has no room for a text, because {mark_count} tokens surround it.",
            field="prompt",
            limit=window,
        )


TOKEN_NUMBERS: dict[PoolingTask, str] = {"token_embed": "Embeddings", "token_classify": "Scores"}


def _check_token_vectors(request: Request, info: ModelInfo, prompts: list[tuple[PreparedPrompt, int]]) -> None:
    """Limit the vectors of single tokens in one answer, and those with a number for each token of the vocabulary.
    Raises InvalidValue."""
    if request.pooling is None or request.pooling.task not in ("embed", *TOKEN_TASKS):
        return
    numbers = info.token_dimensions if request.pooling.task == "token_embed" else len(info.labels)
    most = MAX_TOKEN_VECTOR_NUMBERS // (request.pooling.dimensions or numbers or info.dimensions)
    if request.pooling.task == "embed":
        if "embed_sparse" in info.pooling_tasks and len(prompts) > most:
            raise InvalidValue(
                f"Embeddings over the whole vocabulary can be returned for at most {most} texts in one answer, but "
                f"they were requested for {len(prompts)}. Send fewer texts.",
                field="prompt",
            )
        return
    tokens = sum(len(prepared.token_ids) for prepared, _ in prompts)
    if tokens > most:
        raise InvalidValue(
            f"{TOKEN_NUMBERS[request.pooling.task]} of single tokens can be made for at most {most} tokens in one "
            f"request, but this one has {tokens}. Send fewer or shorter texts.",
            field="prompt",
        )


def _check_text_size(request: Request, limit: int) -> None:
    """Raise TooLarge if a body that may be larger for its media has more text than other bodies may have."""
    size = sum(map(text_characters, request.prompts))
    if size > limit:
        raise TooLarge(f"The text of the request has {size} characters; {limit} are allowed.", size=size, limit=limit)
