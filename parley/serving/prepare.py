"""Prepares a request for the engine: one engine request per prompt, with tokens, output limit, grammar and seed.

Every error in a request is reported here, before anything is queued. Knows no engine, no events and no API.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count

import msgspec

from parley.errors import ContextLength, Invalid, NoTokens, UnknownModel, UnknownToken, excerpt
from parley.serving import beam_limits, embedding
from parley.serving.served_model import Model
from parley.text import Prepared
from parley.text.grammar.compiler import WORKERS
from parley.types import Chat, ModelInfo, Prompt, Request, Text, Work
from parley.web.offload import off_loop

NUMBERS = count()  # keep engine ids unique: a retried request may arrive while the engine still runs its first attempt
MAX_LISTED = 1 << 18  # log-probabilities in one request for those of the whole vocabulary; they take half a second


async def works(model: Model, request: Request, tenant: str) -> list[tuple[Prepared, Work]]:
    """Prepare each prompt and build its engine request. Raises BadRequest, UnknownModel.

    Options that are expressed by other options are replaced in ``request``: banned words, a beam search of width 1.
    """
    check_adapter(model, request)
    embedding.check(request, model.info)
    beam_limits.settle(request, model.settings.max_batch)
    _check_ids(request, model.info)
    size = sum(map(_size, request.prompts)) + 64 * len(request.banned) + len(request.prediction)
    grammars = await _grammars(model, request)
    prompts = await off_loop(size, partial(_prompts, model, request))
    return [
        (prepared, _work(model, request, number, prepared, most, grammars[number], tenant))
        for number, (prepared, most) in enumerate(prompts)
    ]


def check_adapter(model: Model, request: Request) -> None:
    """Raise UnknownModel if the request names an adapter that the model does not have."""
    name, known = request.adapter, model.adapters
    if name is not None and name not in known:
        raise UnknownModel(f"There is no adapter {excerpt(name)}.", name=name, served=list(known), field="adapter")


def _work(
    model: Model, request: Request, number: int, prepared: Prepared, max_tokens: int, grammar: str, tenant: str
) -> Work:
    """Build the engine request of prompt ``number``."""
    language, vocabulary = model.language, model.info.vocab_size
    sampling, stop, want, budget = request.sampling, request.stop, request.want, request.thinking_budget
    seed = sampling.seed if sampling.seed is not None else _drawn(f"{request.id} {number}")
    ranked = 0 if request.best_of is not None else None  # ranking needs the engine's log-probabilities
    return Work(
        id=f"{request.id}-{number}-{next(NUMBERS)}",
        token_ids=prepared.token_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed & (2**64 - 1),
        n=request.made,
        min_tokens=stop.min_tokens,
        stop_ids=sorted({*stop.ids, *(() if stop.ignore_eos else language.tokenizer.eos_ids)}),
        logprobs=0 if want.named else _listed(ranked if want.logprobs is None else want.logprobs, vocabulary),
        prompt_logprobs=_listed(want.prompt_logprobs, vocabulary),
        salt=request.salt,
        costs=want.costs,
        pooling=request.pooling,
        grammar=language.gate(grammar, prepared, want.plain),
        thinking=None if budget is None else language.bound(prepared, budget),
        priority=request.priority,
        tenant=tenant,
        beam=request.beam,
        adapter=request.adapter or "",
        prediction=prepared.predicted.token_ids if prepared.predicted is not None else [],
        named=want.named,
    )


def _drawn(source: str) -> int:
    """Return a 63-bit seed that looks random but is the same on every instance that computes this request."""
    return int.from_bytes(blake2b(source.encode(), digest_size=8).digest()) >> 1


def _listed(wanted: int | None, vocabulary: int) -> int:
    """Return a number of alternatives as the engine expects it: -1 for no log-probabilities at all."""
    if wanted is None:
        return -1
    return vocabulary if wanted < 0 else wanted


async def _grammars(model: Model, request: Request) -> list[str]:
    """Return the grammar that the answer to each prompt must follow, in the engine's format. Raises Invalid."""
    language, grammar, prompts = model.language, request.grammar, request.prompts
    talks = any(isinstance(prompt, Chat) for prompt in prompts)  # plain prompts all have the same grammar
    made = []
    for prompt in prompts if talks else prompts[:1]:
        found = language.found(prompt, grammar)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(WORKERS, language.compile, prompt, grammar)
        made.append(found)
    return made if talks else made * len(prompts)


def _prompts(model: Model, request: Request) -> list[tuple[Prepared, int]]:
    """Tokenize each prompt and compute how many tokens may follow it. Raises BadRequest."""
    language, limit, longest = model.language, model.info.max_model_len, model.options.max_prompt
    made = []
    predicted = language.predict(request.prediction, limit)
    for prompt in request.prompts:
        # With truncation there is no length limit to enforce early.
        most = limit if request.overflow == "refuse" else None
        prepared = language.prepare(prompt, most, request.truncate, request.keep, pooling=request.pooling)
        if longest is not None or request.overflow != "refuse":
            prepared = _shortened(request, prepared, min(longest or limit, limit - 1))
        if predicted is not None:
            prepared = replace(prepared, predicted=predicted)
        made.append((prepared, _room(model, request, prepared.token_ids)))
    _check_lists(request, model.info, made)
    if request.banned:
        request.sampling = msgspec.structs.replace(request.sampling, banned=language.spellings(request.banned))
    return made


def _shortened(request: Request, prepared: Prepared, longest: int) -> Prepared:
    """Truncate a prompt to ``max_prompt`` tokens, if the request allows it. Raises ContextLength."""
    ids = prepared.token_ids
    if len(ids) <= longest:
        return prepared
    if request.overflow == "refuse":
        raise ContextLength(
            f"The prompt has {len(ids)} tokens, but at most {longest} are allowed here. Shorten the prompt.",
            field="prompt",
            limit=longest + 1,
            prompt=len(ids),
        )
    return replace(prepared, token_ids=ids[:longest] if request.overflow == "head" else ids[-longest:])


def _room(model: Model, request: Request, ids: list[int]) -> int:
    """Return how many tokens may be generated after the prompt. Raises ContextLength, Invalid."""
    info, stop = model.info, request.stop
    if not ids:
        raise NoTokens("The prompt is empty: it has no tokens.", field="prompt")
    if max(ids) >= info.vocab_size:
        told = f"Token id {max(ids)} is out of vocabulary: there are {info.vocab_size} tokens."
        raise UnknownToken(told, field="prompt")
    room = info.max_model_len - len(ids)
    wanted = stop.max_tokens if stop.max_tokens is not None else max(1, stop.min_tokens)
    if stop.reserve is not None:
        wanted = min(wanted, stop.reserve)
    if request.pooling is not None:
        wanted = 0
    if wanted > room:
        counted = stop.max_tokens is not None and request.pooling is None
        asked = f" and {wanted} tokens were requested after it" if counted else ""
        raise ContextLength(
            f"This model's maximum context length is {info.max_model_len} tokens. The prompt has {len(ids)}{asked}."
            f" Shorten the prompt{' or ask for fewer tokens' if request.pooling is None else ''}.",
            field="prompt",
            limit=info.max_model_len,
            prompt=len(ids),
            requested=wanted if counted else None,
        )
    given = (stop.max_tokens, model.options.max_output, beam_limits.room(request, info, len(ids), wanted))
    return min([room, *(each for each in given if each is not None)])


def _check_ids(request: Request, info: ModelInfo) -> None:
    """Check that the token ids in the options are in the vocabulary. Raises Invalid."""
    given = {
        "logit_bias": request.sampling.logit_bias,
        "stop_ids": request.stop.ids,
        "allowed_token_ids": request.sampling.allowed,
        "logprob_token_ids": request.want.named,
    }
    for field, ids in given.items():
        if ids and (id := max(ids)) >= info.vocab_size:
            raise Invalid(f"Token id {id} is not in the vocabulary of {info.vocab_size} tokens.", field=field)


def _check_lists(request: Request, info: ModelInfo, prompts: list[tuple[Prepared, int]]) -> None:
    """Limit full-vocabulary log-probabilities to ``MAX_LISTED_LOGPROBS`` values per request. Raises Invalid."""
    want, vocabulary = request.want, info.vocab_size
    lists = {
        "logprobs": request.made * sum(most for _, most in prompts) if want.logprobs == -1 and not want.named else 0,
        "prompt_logprobs": sum(len(prepared.token_ids) for prepared, _ in prompts) if want.prompt_logprobs == -1 else 0,
    }
    most = max(1, MAX_LISTED // vocabulary)
    for field, tokens in lists.items():
        if tokens > most:
            raise Invalid(
                f"Log-probabilities of all {vocabulary} tokens of the vocabulary can be returned for at most "
                f"{most} tokens in one request, but they were requested for {tokens}.",
                field=field,
            )


def _size(prompt: Prompt) -> int:
    """Return roughly how many characters of text a prompt has; 0 for token ids."""
    if isinstance(prompt, Text):
        return len(prompt.text)
    if isinstance(prompt, Chat):
        return sum(len(message.content or "") for message in prompt.messages) + 64 * len(prompt.messages)
    return 0
