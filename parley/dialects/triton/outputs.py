"""The model's output so far as tensors: all of it, or the part since the last call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.triton.model import OUTPUTS
from parley.dialects.triton.sampling import TritonRequest
from parley.dialects.triton.tensors import TensorElement, TritonTensor
from parley.dialects.vectors import vector_numbers
from parley.types import ChoiceDelta, ChoiceDone, Event, FinishReason, PromptAccepted, PromptVector, TokenInfo

FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "tool": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "abort",
}
MIN_LOGPROB = -9999.0  # log-probability of an impossible token


class TritonSequence:
    """One sequence: its output since the last ``take_tensors``, and sums over all of it."""

    def __init__(self, text: str):
        self.text_parts = [text]
        self.new_tokens: list[TokenInfo] = []
        self.logprob_sum = 0.0
        self.reported_tokens = 0  # tokens reported so far
        self.done_event: ChoiceDone | None = None

    def forget_taken(self) -> None:
        """Forget the output that was taken."""
        self.text_parts, self.new_tokens = [], []


class TritonOutputs:
    """The outputs of one request, in the model's declared order."""

    def __init__(self, triton_request: TritonRequest):
        self._triton_request = triton_request
        self._prompt_tokens = 0
        self._has_new_output = False
        self._sequences = [
            TritonSequence(triton_request.text if triton_request.echo else "") for _ in range(triton_request.request.n)
        ]

    @property
    def all_ended(self) -> bool:
        """True if all sequences have ended."""
        return all(choice.done_event is not None for choice in self._sequences)

    @property
    def longest_ended(self) -> int:
        """The tokens of the longest sequence that has ended; a streaming model sends a response for each."""
        return max(
            0 if choice.done_event is None else choice.done_event.usage.completion_tokens for choice in self._sequences
        )

    def collect_events(self, events: Sequence[Event]) -> bool:
        """Collect these events; return True if there is new output since the last ``take_tensors``."""
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt_tokens = len(event.token_ids)
                case ChoiceDelta(index, text, tokens=tokens) if event.output_part != "tool":
                    choice = self._sequences[index]
                    choice.text_parts.append(text)
                    choice.new_tokens += tokens
                    choice.logprob_sum += sum(_floored_logprob(token) for token in tokens)
                    self._has_new_output = self._has_new_output or bool(text or tokens)
                case PromptVector(values=values):
                    self._sequences[0].text_parts.append(encode_json(vector_numbers(values)).decode())
                case ChoiceDone():
                    self._sequences[event.index].done_event = event
                    self._has_new_output = True
        return self._has_new_output

    def take_tensors(self) -> list[TritonTensor]:
        """Return the requested outputs as tensors, and forget the output that was taken."""
        count = len(self._sequences)
        tensors = []
        for output in OUTPUTS.values():
            if output.name in self._triton_request.outputs:
                elements, shape = self._output_elements(output.name), [count]
                if output.name == "num_input_tokens":
                    shape = []
                elif output.name == "output_log_probs":
                    shape = [count, len(elements) // count]
                tensors.append(TritonTensor(output.name, output.datatype, shape, elements))
        for choice in self._sequences:
            choice.forget_taken()
        self._has_new_output = False
        return tensors

    def _output_elements(self, name: str) -> list[TensorElement]:
        sequences = self._sequences
        match name:
            case "text_output":
                return ["".join(choice.text_parts) for choice in sequences]
            case "finish_reason":
                return [
                    "None" if choice.done_event is None else FINISH_REASONS[choice.done_event.reason]
                    for choice in sequences
                ]
            case "stop_reason":
                return ["None" if choice.done_event is None else str(choice.done_event.stop) for choice in sequences]
            case "cumulative_logprob" | "cum_log_probs":
                return [max(choice.logprob_sum, MIN_LOGPROB) for choice in sequences]
            case "logprobs":
                return [self._logprobs_text(choice) for choice in sequences]
            case "num_input_tokens":
                return [self._prompt_tokens]
            case "num_output_tokens":
                return [self._take_token_count(choice) for choice in sequences]
        width = max(len(choice.new_tokens) for choice in sequences)
        rows = [[_floored_logprob(token) for token in choice.new_tokens] for choice in sequences]
        return [score for row in rows for score in row + [0.0] * (width - len(row))]

    def _logprobs_text(self, choice: TritonSequence) -> str:
        if self._triton_request.top_logprobs is None:
            return "null"
        return encode_json(
            [_logprobs_of_token(token, self._triton_request.top_logprobs) for token in choice.new_tokens]
        ).decode()

    def _take_token_count(self, choice: TritonSequence) -> int:
        total = (
            choice.reported_tokens + len(choice.new_tokens)
            if choice.done_event is None
            else choice.done_event.usage.completion_tokens
        )
        new, choice.reported_tokens = total - choice.reported_tokens, total
        return new


def _floored_logprob(token: TokenInfo) -> float:
    return MIN_LOGPROB if token.logprob is None or not token.logprob > MIN_LOGPROB else token.logprob


def _logprobs_of_token(token: TokenInfo, top: int) -> dict[str, Any]:
    """Return the log-probabilities of a token, and of its alternatives if ``top`` is not 0."""
    return {
        str(scored.id): {"logprob": _floored_logprob(scored), "rank": scored.rank, "decoded_token": scored.text}
        for scored in [token, *(token.top_tokens if top else [])]
    }
