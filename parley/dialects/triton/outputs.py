"""The model's output so far as tensors: all of it, or the part since the last call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.triton.errors import encode
from parley.dialects.triton.model import OUTPUTS
from parley.dialects.triton.sampling import Asked
from parley.dialects.triton.tensors import Element, Tensor
from parley.dialects.vectors import numbers
from parley.types import Accepted, Delta, Done, Event, Reason, Token, Vector

FINISH: dict[Reason, str] = {
    "stop": "stop",
    "tool": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "abort",
}
FLOOR = -9999.0  # log-probability of an impossible token


class Choice:
    """One sequence: its output since the last ``take_tensors``, and sums over all of it."""

    def __init__(self, text: str):
        self.text = [text]
        self.tokens: list[Token] = []
        self.total = 0.0
        self.counted = 0  # tokens reported so far
        self.done: Done | None = None

    def clear(self) -> None:
        """Forget the output that was taken."""
        self.text, self.tokens = [], []


class Outputs:
    """The outputs of one request, in the model's declared order."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._prompt_tokens = 0
        self._fresh = False
        self._choices = [Choice(asked.text if asked.echo else "") for _ in range(asked.request.n)]

    @property
    def ended(self) -> bool:
        """True if all sequences have ended."""
        return all(choice.done is not None for choice in self._choices)

    @property
    def length(self) -> int:
        """The tokens of the longest sequence that has ended; a streaming model sends a response for each."""
        return max(0 if choice.done is None else choice.done.usage.completion_tokens for choice in self._choices)

    def add(self, events: Sequence[Event]) -> bool:
        """Collect these events; return True if there is new output since the last ``take_tensors``."""
        for event in events:
            match event:
                case Accepted():
                    self._prompt_tokens = len(event.token_ids)
                case Delta(index, text, tokens=tokens) if event.part != "tool":
                    choice = self._choices[index]
                    choice.text.append(text)
                    choice.tokens += tokens
                    choice.total += sum(_logprob(token) for token in tokens)
                    self._fresh = self._fresh or bool(text or tokens)
                case Vector(values=values):
                    self._choices[0].text.append(encode(numbers(values)).decode())
                case Done():
                    self._choices[event.index].done = event
                    self._fresh = True
        return self._fresh

    def take(self) -> list[Tensor]:
        """Return the requested outputs as tensors, and forget the output that was taken."""
        count = len(self._choices)
        tensors = []
        for output in OUTPUTS.values():
            if output.name in self._asked.outputs:
                elements, shape = self._elements(output.name), [count]
                if output.name == "num_input_tokens":
                    shape = []
                elif output.name == "output_log_probs":
                    shape = [count, len(elements) // count]
                tensors.append(Tensor(output.name, output.datatype, shape, elements))
        for choice in self._choices:
            choice.clear()
        self._fresh = False
        return tensors

    def _elements(self, name: str) -> list[Element]:
        choices = self._choices
        match name:
            case "text_output":
                return ["".join(choice.text) for choice in choices]
            case "finish_reason":
                return ["None" if c.done is None else FINISH[c.done.reason] for c in choices]
            case "stop_reason":
                return ["None" if c.done is None else str(c.done.stop) for c in choices]
            case "cumulative_logprob" | "cum_log_probs":
                return [max(choice.total, FLOOR) for choice in choices]
            case "logprobs":
                return [self._told(choice) for choice in choices]
            case "num_input_tokens":
                return [self._prompt_tokens]
            case "num_output_tokens":
                return [self._count(choice) for choice in choices]
        width = max(len(choice.tokens) for choice in choices)
        rows = [[_logprob(token) for token in choice.tokens] for choice in choices]
        return [score for row in rows for score in row + [0.0] * (width - len(row))]

    def _told(self, choice: Choice) -> str:
        if self._asked.told is None:
            return "null"
        return encode([_scores(token, self._asked.told) for token in choice.tokens]).decode()

    def _count(self, choice: Choice) -> int:
        total = choice.counted + len(choice.tokens) if choice.done is None else choice.done.usage.completion_tokens
        new, choice.counted = total - choice.counted, total
        return new


def _logprob(token: Token) -> float:
    return FLOOR if token.logprob is None or not token.logprob > FLOOR else token.logprob


def _scores(token: Token, top: int) -> dict[str, Any]:
    """Return the log-probabilities of a token, and of its alternatives if ``top`` is not 0."""
    return {
        str(t.id): {"logprob": _logprob(t), "rank": t.rank, "decoded_token": t.text}
        for t in [token, *(token.top if top else [])]
    }
