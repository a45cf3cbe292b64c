"""One request between its admission and its last event: works in the engine, outputs as events, nothing left behind.

A request may have several prompts; each is a work of its own, and their events come as one series. Whatever happens,
``close`` cancels what still runs and gives the places back. Knows no HTTP and no API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from parley.dialects.dialect import Timings
from parley.engine.protocol import Stream
from parley.errors import (
    ContextLength,
    EngineDied,
    EngineError,
    Expired,
    InUse,
    Invalid,
    NoTokens,
    ParleyError,
    UnknownModel,
    UnknownToken,
    excerpt,
)
from parley.server import beams
from parley.server.chance import draw
from parley.server.clock import Clock
from parley.server.model import Model, off_loop
from parley.server.ranking import Ranking
from parley.server.tally import Tally
from parley.server.vector import Pooled, check
from parley.text import Choice, Prepared, Stops, scored
from parley.text.grammar import WORKERS
from parley.types import Accepted, Chat, Done, Event, Output, Prompt, Reason, Request, Score, Scored, Text, Usage, Work

MAX_LISTED = 1 << 21  # log-probabilities of one request that wants those of the whole vocabulary
UNANSWERED = "The engine ended this request without an answer."


@dataclass(eq=False)
class Branch:
    """One prompt of a request, in the engine's hands. Outputs are held until the scores that precede them are there.

    ``ranking``: of its choices only the best are given.
    """

    number: int
    prepared: Prepared
    stream: Stream
    choices: list[Choice] | list[Pooled]
    scores_due: bool
    ranking: Ranking | None = None
    held: list[Output] = field(default_factory=list)


class Generation:
    """One request from its admission to its last event. ``tenant``: on whose behalf it is."""

    def __init__(self, model: Model, request: Request, tally: Tally, tenant: str = ""):
        request.model = tally.note.model = model.called(request.model)
        if request.adapter is None and request.model in model.adapters:
            request.adapter = request.model
        if request.sole and model.labelled(request.sole):
            raise InUse(f"Another request is running under the id {excerpt(request.sole)}.")
        model.hold(request.places, tenant)
        model.open[self] = None
        self.usage = Usage()
        self._model = model
        self._request = request
        self._tally = tally
        self._tenant = tenant
        self._branches: list[Branch] = []
        self._grammars: list[str] = []  # what the answer to each prompt follows
        self._pumps: list[asyncio.Task[None]] = []  # with several prompts: they bring their outputs together
        self._queue: asyncio.Queue[tuple[Branch, list[Output]]]
        self._fresh: list[Event] = []  # made by begin, given by the first next
        self._left = request.n * len(request.prompts)  # choices without their last event
        self._error: ParleyError | None = None
        self._closed = False
        self._stopped: Reason | None = None  # how it was, if it was from outside
        limits = (request.timeout, model.options.timeout, model.options.token_timeout)
        self._clock = Clock(*limits, self._expire) if any(limits) else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names under which it can be stopped."""
        return self._request.id, *self._request.labels

    @property
    def adapter(self) -> tuple[str, bool] | None:
        """The adapter that it has, if any, and whether it still waits for its first token."""
        name = self._request.adapter
        return None if name is None else (name, self._tally.waits)

    async def begin(self) -> None:
        """Make the prompts ready, check them, and hand them to the engine. Raises BadRequest, NotReady."""
        request, model = self._request, self._model
        self._check_adapter()
        check(request, model.info)
        beams.settle(request, model.settings.max_batch)
        self._check_ids()
        size = sum(map(_size, request.prompts)) + 64 * len(request.banned)
        self._grammars = await self._compile()
        prepared = await off_loop(size, self._prepare)
        strings = request.stop.strings
        stops = await off_loop(16 * sum(map(len, strings)), partial(Stops, strings)) if strings else None
        if self._error is not None:
            raise self._error
        model.require()  # it may have changed while a long prompt was read
        self._check_adapter()
        stop_ids = sorted({*request.stop.ids, *(() if request.stop.ignore_eos else model.language.tokenizer.eos_ids)})
        for number, (ready, max_tokens) in enumerate(prepared):
            self._submit(number, ready, max_tokens, stops, stop_ids)
        if self._stopped:
            self.stop(self._stopped)
        self._tally.submit(request, self.usage)
        if len(self._branches) > 1:
            self._queue = asyncio.Queue()
            self._pumps = [asyncio.create_task(self._pump(branch)) for branch in self._branches]

    async def next(self) -> list[Event]:
        """The events since the last time, at least one; none when every choice has ended. Raises ParleyError."""
        while True:
            if self._fresh:
                events, self._fresh = self._fresh, []
                return events
            if self._error is not None:
                raise self._error
            if not self._left:
                return []
            if len(self._branches) == 1:
                arrived = [(self._branches[0], await self._branches[0].stream.next())]
            else:
                arrived = [await self._queue.get()]
                while not self._queue.empty():
                    arrived.append(self._queue.get_nowait())
            for branch, outputs in arrived:
                if not outputs and not self._error and any(not choice.ended for choice in branch.choices):
                    raise EngineError(UNANSWERED)
                self._fresh += self._take(branch, outputs)

    async def feed(self, take: Callable[[list[Event]], bool]) -> None:
        """Let ``take`` have the events of each step when they come, until it returns False or there are no more.

        For one prompt, whose steps do not wake this task. Raises ParleyError, and what ``take`` raises.
        """
        if len(self._branches) > 1:
            while (events := await self.next()) and take(events):
                pass
            return
        (branch,) = self._branches
        more = True
        while more:
            if self._fresh:
                events, self._fresh = self._fresh, []
                more = take(events)
            elif self._error is not None:
                raise self._error
            elif not self._left:
                return
            elif branch.stream.ended:
                raise EngineError(UNANSWERED)
            else:
                more = await branch.stream.feed(lambda outputs: take(self._take(branch, outputs)))

    @property
    def ended(self) -> bool:
        """Have all events been given?"""
        return not self._left and not self._fresh

    def abort(self, error: ParleyError) -> None:
        """End it from outside: whoever waits for events, or asks for the next ones, gets the error."""
        self._error = self._error or error
        for branch in self._branches:
            branch.stream.cancel()

    def stop(self, reason: Reason = "cancel") -> None:
        """End it from outside as if it had been finished: what comes next are the last events of every choice."""
        self._stopped = reason
        if self._request.pooling is not None:
            return  # a vector is there whole, or not at all
        for branch in self._branches:
            branch.stream.cancel()
            for index, choice in enumerate(branch.choices):
                assert isinstance(choice, Choice)
                self._fresh += self._give(branch, index, choice.close(reason))

    def _expire(self, error: Expired) -> None:
        if self._request.partial:
            self.stop("length")
        else:
            self.abort(error)

    @property
    def timings(self) -> Timings:
        return self._tally.timings()

    def close(self) -> None:
        """Stop whatever still runs, give the places back, and count what was done."""
        if self._closed:
            return
        self._closed = True
        if self._clock is not None:
            self._clock.stop()
        for task in self._pumps:
            task.cancel()
        for branch in self._branches:
            branch.stream.cancel()
        self._model.free(self._request.places, self._tenant)
        self._model.open.pop(self, None)
        given = [branch.ranking.best if branch.ranking else branch.choices for branch in self._branches]
        delivered = [choice.usage.completion_tokens for choices in given for choice in choices]
        self._tally.close(delivered, self._left, failed=self._error is not None)

    # -- before the engine

    async def _compile(self) -> list[str]:
        """What the answer to each prompt has to follow, as the engine reads it. Raises Invalid."""
        language, grammar, prompts = self._model.language, self._request.grammar, self._request.prompts
        talks = any(isinstance(prompt, Chat) for prompt in prompts)  # plain prompts are all alike in this
        made = []
        for prompt in prompts if talks else prompts[:1]:
            found = language.found(prompt, grammar)
            if found is None:
                found = await asyncio.get_running_loop().run_in_executor(WORKERS, language.compile, prompt, grammar)
            made.append(found)
        return made if talks else made * len(prompts)

    def _prepare(self) -> list[tuple[Prepared, int]]:
        """Each prompt in tokens, and how many may be generated behind it."""
        language, limit = self._model.language, self._model.info.max_model_len
        request, longest = self._request, self._model.options.max_prompt
        made = []
        for prompt in request.prompts:
            # where a prompt is cut anyway, none is hopelessly long
            most = limit if request.overflow == "refuse" else None
            ready = language.prepare(prompt, most, request.truncate, pooling=request.pooling)
            if longest is not None or request.overflow != "refuse":
                ready = self._shortened(ready, min(longest or limit, limit - 1))
            made.append((ready, self._room(ready.token_ids)))
        self._check_lists(made)
        if request.banned:
            spellings = language.spellings(request.banned)
            request.sampling = msgspec.structs.replace(request.sampling, banned=spellings)
        return made

    def _shortened(self, ready: Prepared, longest: int) -> Prepared:
        """A prompt of at most so many tokens. Raises ContextLength."""
        ids = ready.token_ids
        if len(ids) <= longest:
            return ready
        if self._request.overflow == "refuse":
            raise ContextLength(
                f"The prompt has {len(ids)} tokens, but at most {longest} are allowed here. Shorten the prompt.",
                field="prompt",
                limit=longest + 1,
                prompt=len(ids),
            )
        return replace(ready, token_ids=ids[:longest] if self._request.overflow == "head" else ids[-longest:])

    def _check_lists(self, prepared: list[tuple[Prepared, int]]) -> None:
        """Of how many tokens may the log-probabilities of the whole vocabulary be told? Raises Invalid."""
        want, vocabulary = self._request.want, self._model.info.vocab_size
        lists = {
            "logprobs": self._request.made * sum(most for _, most in prepared) if want.logprobs == -1 else 0,
            "prompt_logprobs": sum(len(ready.token_ids) for ready, _ in prepared) if want.prompt_logprobs == -1 else 0,
        }
        for field_, tokens in lists.items():
            if tokens * vocabulary > MAX_LISTED:
                raise Invalid(
                    f"Log-probabilities of all {vocabulary} tokens of the vocabulary can be told of at most "
                    f"{MAX_LISTED // vocabulary} tokens in one request, but they were requested of {tokens}.",
                    field=field_,
                )

    def _check_adapter(self) -> None:
        """Raises UnknownModel."""
        name, known = self._request.adapter, self._model.adapters
        if name is not None and name not in known:
            raise UnknownModel(f"There is no adapter {excerpt(name)}.", name=name, served=list(known), field="adapter")

    def _check_ids(self) -> None:
        """Token ids that a client gave must be in the vocabulary."""
        vocabulary = self._model.info.vocab_size
        request = self._request
        given = {
            "logit_bias": request.sampling.logit_bias,
            "stop_ids": request.stop.ids,
            "allowed_token_ids": request.sampling.allowed,
        }
        for field_, ids in given.items():
            if ids and (id := max(ids)) >= vocabulary:
                raise Invalid(f"Token id {id} is not in the vocabulary of {vocabulary} tokens.", field=field_)

    def _room(self, ids: list[int]) -> int:
        """How many tokens may be generated behind the prompt. Raises ContextLength, Invalid."""
        info, stop = self._model.info, self._request.stop
        if not ids:
            raise NoTokens("The prompt is empty: it has no tokens.", field="prompt")
        if max(ids) >= info.vocab_size:
            told = f"Token id {max(ids)} is not in the vocabulary of {info.vocab_size} tokens."
            raise UnknownToken(told, field="prompt")
        room = info.max_model_len - len(ids)
        wanted = stop.max_tokens if stop.max_tokens is not None else max(1, stop.min_tokens)
        if stop.reserve is not None:
            wanted = min(wanted, stop.reserve)
        if self._request.pooling is not None:
            wanted = 0
        if wanted > room:
            counted = stop.max_tokens is not None and self._request.pooling is None
            asked = f" and {wanted} tokens were requested behind it" if counted else ""
            raise ContextLength(
                f"This model's maximum context length is {info.max_model_len} tokens. The prompt has {len(ids)}{asked}."
                f" Shorten the prompt{' or ask for fewer tokens' if self._request.pooling is None else ''}.",
                field="prompt",
                limit=info.max_model_len,
                prompt=len(ids),
                requested=wanted if counted else None,
            )
        given = (stop.max_tokens, self._model.options.max_output, beams.room(self._request, info, len(ids), wanted))
        return min([room, *(each for each in given if each is not None)])

    def _submit(self, number: int, ready: Prepared, max_tokens: int, stops: Stops | None, stop_ids: list[int]) -> None:
        request, model = self._request, self._model
        sampling, want, budget = request.sampling, request.want, request.thinking_budget
        language = model.language
        seed = sampling.seed if sampling.seed is not None else int.from_bytes(draw()) >> 65
        work = Work(
            id=f"{request.id}-{number}",
            token_ids=ready.token_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed & (2**64 - 1),
            n=request.made,
            min_tokens=request.stop.min_tokens,
            stop_ids=stop_ids,
            logprobs=self._listed(0 if want.logprobs is None and request.best_of is not None else want.logprobs),
            prompt_logprobs=self._listed(want.prompt_logprobs),
            salt=request.salt,
            costs=want.costs,
            pooling=request.pooling,
            adapter=request.adapter or "",
            grammar=language.gate(self._grammars[number], ready, want.plain),
            thinking=None if budget is None else language.bound(ready, budget),
            priority=request.priority,
            beam=request.beam,
            tenant=self._tenant,
        )
        first = number * request.n
        tokenizer = model.language.tokenizer
        drafted = [
            Choice(request, first + k, tokenizer, ready, stops, details=request.want.ids) for k in range(request.made)
        ]
        choices = drafted if request.pooling is None else [Pooled(number, len(ready.token_ids))]
        due = want.prompt_logprobs is not None
        ranking = Ranking(drafted, first, request.n) if request.best_of is not None else None
        self._branches.append(Branch(number, ready, model.engine.submit(work), choices, due, ranking))
        self.usage.prompt_tokens += len(ready.token_ids)
        self._fresh.append(Accepted(number, ready.token_ids, work.seed))
        if want.echo and not due:
            self._fresh.append(self._scored(self._branches[-1], None))

    def _listed(self, wanted: int | None) -> int:
        """A number of alternatives as the engine has it."""
        if wanted is None:
            return -1
        return self._model.info.vocab_size if wanted < 0 else wanted

    # -- behind the engine

    async def _pump(self, branch: Branch) -> None:
        while outputs := await branch.stream.next():
            self._queue.put_nowait((branch, outputs))
        self._queue.put_nowait((branch, []))

    def _take(self, branch: Branch, outputs: list[Output]) -> list[Event]:
        events: list[Event] = []
        if branch.scores_due:
            outputs = branch.held + outputs
            scores = next((output.prompt_scores for output in outputs if output.prompt_scores is not None), None)
            failed = any(output.finish == "error" for output in outputs)
            if scores is None and not failed:
                branch.held = outputs
                return events
            branch.scores_due, branch.held = False, []
            if scores is not None:
                events.append(self._scored(branch, scores))
        now = time.perf_counter()
        if self._clock is not None:
            self._clock.seen()
        first = branch.number * self._request.made
        for output in outputs:
            if output.finish == "error":
                self._error = self._failure(output)
                raise self._error
            if output.token_ids or output.vector is not None:
                self._tally.tokens(first + output.index, len(output.token_ids), now, output.waited)
            if output.preemptions:
                self._tally.preempt(first + output.index, output.preemptions)
            choice = branch.choices[output.index]
            made = choice.push(output)
            if made and isinstance(made[-1], Done) and output.finish is None:
                branch.stream.cancel(output.index)  # a stop string was found, of which the engine knows nothing
            events += self._give(branch, output.index, made)
        return events

    def _give(self, branch: Branch, index: int, made: list[Event]) -> list[Event]:
        """What is given of the events of a choice, now that they are there."""
        given = made if branch.ranking is None else branch.ranking.add(index, made)
        for event in given:
            if isinstance(event, Done):
                self._end(event, branch)
        return given

    def _scored(self, branch: Branch, scores: list[Score | None] | None) -> Scored:
        want, tokenizer, ids = self._request.want, self._model.language.tokenizer, branch.prepared.token_ids
        event = scored(tokenizer, branch.number, ids, scores, want.prompt_logprobs or 0)
        if want.echo:
            prompt = self._request.prompts[branch.number]
            event.text = prompt.text if isinstance(prompt, Text) else tokenizer.decode(ids, want.skip_special)
        return event

    def _end(self, done: Done, branch: Branch) -> None:
        self._left -= 1
        self.usage.completion_tokens += done.usage.completion_tokens
        self.usage.reasoning_tokens += done.usage.reasoning_tokens
        if (
            done.index % self._request.n == 0
        ):  # the engine's first choice; the others always find the prompt in the cache
            self.usage.cached_tokens += branch.choices[0].usage.cached_tokens
        self._tally.end(done.reason)

    def _failure(self, output: Output) -> ParleyError:
        message = output.error or "The engine failed this request."
        return EngineError(message) if self._model.engine.state == "ready" else EngineDied(message)


def _size(prompt: Prompt) -> int:
    """Characters of a prompt's text, roughly."""
    if isinstance(prompt, Text):
        return len(prompt.text)
    if isinstance(prompt, Chat):
        return sum(len(message.content or "") for message in prompt.messages) + 64 * len(prompt.messages)
    return 0
