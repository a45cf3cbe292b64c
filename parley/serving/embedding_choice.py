"""Embedding requests: the events of their single output. Knows nothing of text."""

from __future__ import annotations

from parley.types import TOKEN_TASKS, ChoiceDone, EngineOutput, Event, PoolingTask, PromptVector, Usage


class EmbeddingChoice:
    """The counterpart of ``text.AnswerChoice`` in an embedding request: turns a prompt's output into events."""

    def __init__(self, prompt_number: int, prompt_tokens: int, task: PoolingTask):
        self.prompt_number = prompt_number
        self._rows = prompt_tokens if task in TOKEN_TASKS else 1
        self.finished = False
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def push_output(self, output: EngineOutput) -> list[Event]:
        """Return the events of the only output."""
        assert output.vector is not None
        self.finished = True
        self.usage.cached_tokens = output.cached_tokens
        vector = PromptVector(self.prompt_number, output.vector, self._rows)
        return [vector, ChoiceDone(self.prompt_number, "stop", self.usage)]
