"""vLLM's ``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: its chunks, its errors, its usage.

The form is read in ``dialects/openai/transcriptions.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from parley.dialects.fields import Fields
from parley.dialects.form_data import UploadedFile, decode_form, with_arrays
from parley.dialects.openai import transcripts
from parley.dialects.openai.transcriptions import ARRAY_MEMBERS, FILE_MEMBERS, TranscriptionReply
from parley.dialects.openai.transcripts import SpeechTask
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE, data_event
from parley.dialects.vllm.answer_parts import vllm_envelope
from parley.dialects.vllm.error_answers import vllm_error_answer, vllm_failure_events
from parley.dialects.vllm.refusal_wording import VLLM_WORDING
from parley.errors import BadMedia, InvalidValue, ParleyError, WrongType, excerpt
from parley.types import ChoiceDelta, ChoiceDone, Event, Media, PromptAccepted, Usage

FORMATS_SENTENCE = "Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`"
FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "repetition", "cancel": "abort"}
MAX_TEMPERATURE = 2
OBJECT_NAMES: dict[SpeechTask, tuple[str, str]] = {
    "transcribe": ("trsc", "transcription.chunk"),
    "translate": ("trsl", "translation.chunk"),
}


class NotUploaded(WrongType):
    """The file is a text: in the original its type is checked before all else."""

    status = 422


class VllmTranscriptionReply(TranscriptionReply):
    """A request for the text of a clip, answered in vLLM's form."""

    max_temperature = MAX_TEMPERATURE

    def __init__(self, task: SpeechTask, body: bytes, context: RequestContext):
        super().__init__(task, body, context)
        self._prompt_tokens = self._sent_tokens = 0

    def read_form(self, body: bytes, context: RequestContext) -> Fields:
        """Return the members of the form. Raises MalformedBody."""
        form = decode_form(body, context.headers.get(b"content-type", b""), FILE_MEMBERS, VLLM_WORDING)
        return with_arrays(form, ARRAY_MEMBERS)

    def read_clip(self, form: Fields) -> Media:
        """Return the file of the form. Raises BadRequest."""
        file = form.raw_value("file")
        if isinstance(file, UploadedFile) and file.filename is None:
            raise NotUploaded(form.mistyped_member("file", "a file").message, field="body.file")
        return super().read_clip(form)

    def empty_clip_error(self) -> InvalidValue:
        """Return the error for an empty file."""
        return InvalidValue("Invalid or unsupported audio file.")

    def refuse_model(self, model: str) -> NoReturn:
        """Raise the error for a model that cannot do the task."""
        raise InvalidValue(f"The model does not support {self.api_name} API")

    def read_format(self, form: Fields, model: str, *, stream: bool) -> str:
        """Return the format of the answer. Raises BadRequest."""
        response_format = super().read_format(form, model, stream=False)
        if response_format in ("srt", "vtt"):
            raise InvalidValue(FORMATS_SENTENCE)
        if stream and response_format == "verbose_json":
            raise InvalidValue("verbose_json format doesn't support streaming case")
        return response_format

    def language_error(self, text: str, field: str) -> InvalidValue:
        """Return the error for a language that the model does not know."""
        return InvalidValue(f"Unsupported language: {excerpt(text)}. Must be one of {list(self.family.languages)}.")

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each new piece of the text, and one for its end."""
        chunks = []
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt_tokens = len(event.token_ids)
                case ChoiceDelta():
                    self._sent_tokens += len(event.tokens)
                    if text := self.read_delta(event):
                        chunks.append(self._chunk_frame([{"delta": {"content": text}}]))
                case ChoiceDone():
                    chunks.append(self._chunk_frame([self._last_choice(event)]))
        return b"".join(chunks)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        totals = _usage_counts(usage.prompt_tokens, usage.completion_tokens)
        return data_event(self._chunk_envelope([]) | {"usage": totals}) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return vLLM's error event and the ``[DONE]`` mark."""
        return vllm_failure_events(error)

    def _last_choice(self, done: ChoiceDone) -> dict[str, Any]:
        reason = FINISH_REASONS.get(done.reason, done.reason)
        return {"delta": {"content": self.finish_text()}, "finish_reason": reason, "stop_reason": done.stop}

    def _chunk_frame(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._chunk_envelope(choices)
        if self.usage_per_chunk:
            chunk["usage"] = _usage_counts(self._prompt_tokens, self._sent_tokens)
        return data_event(chunk)

    def _chunk_envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix, object_name = OBJECT_NAMES[self.task]
        answer_id = f"{prefix}-{self.request.id}"
        return vllm_envelope(answer_id, object_name, self.context, self.request, choices)

    # -- one answer

    def json_answer(self, text: str, usage: Usage) -> dict[str, Any]:
        """Return the answer as JSON without times."""
        return {"text": text, "usage": transcripts.duration_usage(usage.media_seconds.get("audio", 0.0))}

    def show_language(self, name: str) -> str:
        """Return the code of a language."""
        return next((code for code, language in self.family.languages.items() if language == name), name)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return vLLM's answer to a clip that cannot be used."""
        match error:
            case BadMedia(reason="too_large"):
                return vllm_error_answer(InvalidValue("Maximum file size exceeded"))
            case BadMedia(reason="unknown_format" | "undecodable"):
                return vllm_error_answer(InvalidValue("Invalid or unsupported audio file."))
        return None


read_vllm_transcription = partial(VllmTranscriptionReply, "transcribe")
read_vllm_translation = partial(VllmTranscriptionReply, "translate")


def _usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
