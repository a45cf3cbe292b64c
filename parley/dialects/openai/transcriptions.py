"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: a form with a clip in, its text out.

The clip becomes part of a conversation that asks the model for its text, in the form that its family was trained with
(``text/speech.py``). vLLM's additions to the form are read too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from parley.dialects.facts import ServerFacts
from parley.dialects.fields import Fields
from parley.dialects.form_data import UploadedFile, decode_form, with_arrays
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import transcripts
from parley.dialects.openai.common_members import MAX_TOKENS, unsupported_member_error
from parley.dialects.openai.error_answers import openai_error_answer, openai_error_object
from parley.dialects.openai.transcripts import SpeechTask, Transcript
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.dialects.sse import data_event
from parley.errors import BadMedia, InvalidValue, ParleyError, TooLarge, UnsuitableModel, excerpt
from parley.text.speech import TranscriptReader, speech_family, transcription_chat, translation_chat
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    Event,
    Media,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
    UploadedMedia,
    Usage,
)

FILE_MEMBERS = ("file",)
ARRAY_MEMBERS = (
    "include",
    "keywords",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
    "timestamp_granularities",
)
RESPONSE_FORMATS = ("json", "text", "srt", "verbose_json", "vtt", "diarized_json")
FORMAT_WRITERS: Mapping[str, Callable[[Transcript], bytes]] = {
    "text": transcripts.write_text,
    "srt": transcripts.write_srt,
    "verbose_json": transcripts.write_verbose_json,
    "vtt": transcripts.write_vtt,
}
FILE_FORMATS = ["flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "wav", "webm"]
MAX_CONTEXT_CHARACTERS = 100_000
MAX_LISTED = 1024  # items of an array
MAX_SPEAKERS = 4
API_NAMES: Mapping[SpeechTask, str] = {"transcribe": "Transcriptions", "translate": "Translations"}


def read_transcription(body: bytes, context: RequestContext) -> TranscriptionReply:
    """Read a request for the text of a clip. Raises BadRequest."""
    return TranscriptionReply("transcribe", body, context)


def read_translation(body: bytes, context: RequestContext) -> TranscriptionReply:
    """Read a request for the text of a clip in English. Raises BadRequest."""
    return TranscriptionReply("translate", body, context)


def refuse_speech(body: bytes, context: RequestContext, facts: ServerFacts) -> NoReturn:
    """Raise UnsuitableModel for ``POST /v1/audio/speech``: no model here writes sound."""
    raise UnsuitableModel("Text to speech is not available on this server: its models write text only.", field="model")


class TranscriptionReply(Reply):
    """A request for the text of a clip, answered in OpenAI's form."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "file", "max_tokens": "max_completion_tokens"}
    max_temperature: ClassVar[float] = 1

    def __init__(self, task: SpeechTask, body: bytes, context: RequestContext):
        form = self.read_form(body, context)
        self.context, self.task = context, task
        self.family = speech_family(context.media_family)
        model = form.string("model", "", cap=256)
        self._check_model(model)
        clip = self.read_clip(form)
        stream = form.boolean("stream", False)
        self._format = self.read_format(form, model, stream=stream)
        language, chat = self._read_conversation(form, clip)
        self._wants_logprobs = _reads_logprobs(form, self._format)
        _read_granularities(form, self._format)
        _refuse_unavailable(form)
        wants_usage = form.boolean("stream_include_usage", False)
        self.usage_per_chunk = form.boolean("stream_continuous_usage_stats", False) and wants_usage
        self.request = Request(
            id=context.unique_id,
            model=model,
            prompts=[chat],
            sampling=read_speech_sampling(form, self.max_temperature),
            stop_conditions=StopConditions(max_tokens=form.integer("max_completion_tokens", None, 1, MAX_TOKENS)),
            output_options=OutputOptions(
                logprobs=0 if self._wants_logprobs or self._format == "verbose_json" else None,
                usage=wants_usage,
                ids=self.usage_per_chunk,
                unparsed=True,
            ),
            stream=stream,
        )
        self._reader = TranscriptReader(self.family, language)
        self._text: list[str] = []
        self._rendered_tokens = 0  # of the reader's tokens, those that a delta had
        if self._format in ("text", "srt", "vtt"):
            self.content_type = transcripts.PLAIN_TEXT

    # -- the form

    def read_form(self, body: bytes, context: RequestContext) -> Fields:
        """Return the members of the form. Raises MalformedBody."""
        form = decode_form(body, context.headers.get(b"content-type", b""), FILE_MEMBERS)
        return with_arrays(form, ARRAY_MEMBERS)

    @property
    def api_name(self) -> str:
        """The name of the API in errors."""
        return API_NAMES[self.task]

    def read_clip(self, form: Fields) -> Media:
        """Return the file of the form. Raises BadRequest."""
        if not form.has_value("file"):
            raise form.missing_member("file")
        file = form.raw_value("file")
        if not isinstance(file, UploadedFile):
            raise form.member_error("file", "a request has exactly one file.")
        if not file.content:
            raise self.empty_clip_error()
        return Media("audio", UploadedMedia(file.content), "file")

    def empty_clip_error(self) -> InvalidValue:
        """Return the error for an empty file."""
        message = "Audio file is too short. Minimum audio length is 0.1 seconds."
        return InvalidValue(message, field="file", code="audio_too_short")

    def _check_model(self, model: str) -> None:
        """Raise BadRequest if the model cannot do the task."""
        hears = self.context.media_limits.get("audio", 0) > 0 and self.context.generates
        if not hears or (self.task == "translate" and not self.family.follows_instructions):
            names = sorted(self.context.model_names)
            self.refuse_model(model or (names[0] if names else ""))

    def refuse_model(self, model: str) -> NoReturn:
        """Raise the error for a model that cannot do the task."""
        raise UnsuitableModel(f"The model {excerpt(model)} does not support {self.api_name} API", field="model")

    def read_format(self, form: Fields, model: str, *, stream: bool) -> str:
        """Return the format of the answer. Raises BadRequest."""
        name = "response_format"
        response_format = form.string(name, "json", allowed=RESPONSE_FORMATS)
        if response_format == "diarized_json":
            raise InvalidValue(
                f"response_format 'diarized_json' is not compatible with model {excerpt(model)}. "
                "Use 'json', 'text', 'srt', 'verbose_json' or 'vtt' instead.",
                field=name,
                code="unsupported_value",
            )
        if stream and response_format not in ("json", "text"):
            raise InvalidValue(
                f"response_format '{response_format}' cannot be streamed. Use 'json' or 'text', or no 'stream'.",
                field=name,
                code="unsupported_value",
            )
        return response_format

    def _read_conversation(self, form: Fields, clip: Media) -> tuple[str, ChatPrompt]:
        """Return the language as far as it is given, and the conversation."""
        language = self._read_language(form, "language") or self._read_single_language(form)
        spoken_context = _read_spoken_context(form)
        target = self._read_language(form, "to_language")
        if self.task == "transcribe":
            if target and target != language:
                raise form.member_error("to_language", "only a translation can be in another language.")
            return language, transcription_chat(self.family, clip, language, spoken_context)
        target = target or "English"
        return target, translation_chat(clip, language, target, spoken_context)

    def _read_single_language(self, form: Fields) -> str:
        """Return the only one of ``languages``. Raises BadRequest for several, which no model here can choose from."""
        codes = form.strings("languages", cap=MAX_LISTED, total=MAX_CONTEXT_CHARACTERS)
        if len(codes) > 1:
            raise unsupported_member_error(form, "languages", "A choice among several languages is")
        return self._find_language(codes[0], "languages[0]") if codes else ""

    def _read_language(self, form: Fields, name: str) -> str:
        text = form.string(name, "", cap=64)
        return self._find_language(text, name) if text else ""

    def _find_language(self, text: str, field: str) -> str:
        """Return the name of a language, given its code or its name in English. Raises InvalidValue."""
        language_name = text.strip().lower()
        for code, name in self.family.languages.items():
            if language_name in (code, name.lower()):
                return name
        raise self.language_error(text, field)

    def language_error(self, text: str, field: str) -> InvalidValue:
        """Return the error for a language that the model does not know."""
        codes = ", ".join(self.family.languages)
        return InvalidValue(
            f"Invalid language {excerpt(text)}. The codes of the languages that this model knows are {codes}.",
            field=field,
            code="invalid_language_format",
        )

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each new piece of the text."""
        return b"".join(self._delta_event(text) for event in events if (text := self.read_delta(event)))

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the event with the whole text."""
        last_text = self.finish_text()
        done: dict[str, Any] = {"type": "transcript.text.done", "text": "".join(self._text)}
        if self._wants_logprobs:
            done["logprobs"] = transcripts.transcript_logprobs(self._reader.tokens)
        done["usage"] = transcripts.token_usage(usage)
        return (self._delta_event(last_text) if last_text else b"") + data_event(done)

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event."""
        return data_event(openai_error_object(error))

    def _delta_event(self, text: str) -> bytes:
        delta: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
        if self._wants_logprobs:
            delta["logprobs"] = transcripts.transcript_logprobs(self._reader.tokens[self._rendered_tokens :])
            self._rendered_tokens = len(self._reader.tokens)
        return data_event(delta)

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text."""
        for event in events:
            self.read_delta(event)

    def render_body(self, usage: Usage) -> bytes:
        """Return the transcript in the format that the client asked for."""
        self.finish_text()
        if self._format == "json":
            return encode_json(self.json_answer("".join(self._text), usage))
        return FORMAT_WRITERS[self._format](self._transcript_object(usage))

    def json_answer(self, text: str, usage: Usage) -> dict[str, Any]:
        """Return the answer as JSON without times."""
        answer: dict[str, Any] = {"text": text}
        if self._wants_logprobs:
            answer["logprobs"] = transcripts.transcript_logprobs(self._reader.tokens)
        return answer | {"usage": transcripts.token_usage(usage)}

    def show_language(self, name: str) -> str:
        """Return a language as this API shows it."""
        return name.lower()

    def _transcript_object(self, usage: Usage) -> Transcript:
        return Transcript(
            self.task,
            "".join(self._text),
            self.show_language(self._reader.language),
            usage.media_seconds.get("audio", 0.0),
            self._reader.tokens,
            self.request.sampling.temperature,
            self._reader.hears_nobody,
        )

    # -- both

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return OpenAI's answer to a clip that is too large or of an unknown format."""
        if isinstance(error, BadMedia):
            return openai_error_answer(_clip_error(error))
        return None

    def read_delta(self, event: Event) -> str:
        """Return the part of the text that an event completes."""
        if not isinstance(event, ChoiceDelta):
            return ""
        return self._add_text(self._reader.read_text(event.text, event.tokens))

    def finish_text(self) -> str:
        """Return the last part of the text, after all events."""
        return self._add_text(self._reader.finish_text())

    def _add_text(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text


def _read_spoken_context(form: Fields) -> str:
    """Return the client's hints about the speech: an earlier text or spellings, and words that may occur."""
    keywords = form.strings("keywords", cap=MAX_LISTED, total=MAX_CONTEXT_CHARACTERS)
    hints = (
        form.string("prompt", "", cap=MAX_CONTEXT_CHARACTERS),
        ", ".join(keywords),
        form.string("hotwords", "", cap=MAX_CONTEXT_CHARACTERS),
    )
    return "\n".join(filter(None, hints))


def _reads_logprobs(form: Fields, response_format: str) -> bool:
    """Return whether log-probabilities are asked for. Raises BadRequest."""
    included = form.strings("include", cap=MAX_LISTED, total=MAX_CONTEXT_CHARACTERS)
    for name in included:
        if name != "logprobs":
            raise form.member_error("include", f"the only supported value is 'logprobs', but got {excerpt(name)}.")
    if included and response_format != "json":
        raise InvalidValue(
            "include 'logprobs' is only supported with response_format 'json'.",
            field="include",
            code="unsupported_value",
        )
    return bool(included)


def _read_granularities(form: Fields, response_format: str) -> None:
    """Check which times the client asks for. Raises BadRequest for times of words, which no model gives."""
    name = "timestamp_granularities"
    granularities = form.strings(name, cap=MAX_LISTED, total=MAX_CONTEXT_CHARACTERS)
    for granularity in granularities:
        if granularity not in ("word", "segment"):
            raise form.member_error(name, f"must be 'word' or 'segment', but got {excerpt(granularity)}.")
    if granularities and response_format != "verbose_json":
        raise InvalidValue(
            "timestamp_granularities is only supported with response_format 'verbose_json'.",
            field=name,
            code="unsupported_value",
        )
    if "word" in granularities:
        raise InvalidValue(
            "timestamp_granularities 'word' is not supported: the model gives no times of words. Use 'segment'.",
            field=name,
            code="unsupported_value",
        )


def _refuse_unavailable(form: Fields) -> None:
    """Refuse members for abilities that no model here has. Raises BadRequest."""
    if form.strings("known_speaker_names", cap=MAX_SPEAKERS, total=MAX_CONTEXT_CHARACTERS):
        raise unsupported_member_error(form, "known_speaker_names", "Telling speakers apart is")
    if form.array("known_speaker_references", cap=MAX_SPEAKERS):
        raise unsupported_member_error(form, "known_speaker_references", "Telling speakers apart is")
    if form.raw_value("chunking_strategy") not in (None, "auto"):
        raise unsupported_member_error(form, "chunking_strategy", "Another strategy than 'auto' is")
    if form.boolean("use_beam_search", False):
        raise unsupported_member_error(form, "use_beam_search", "Beam search for transcripts is")
    form.integer("n", 1, 1, 1)
    form.number("length_penalty", 1.0)
    form.boolean("include_stop_str_in_output", False)
    if form.has_value("vllm_xargs"):
        form.with_parsed_text("vllm_xargs", cap=MAX_CONTEXT_CHARACTERS).free_object("vllm_xargs")


def read_speech_sampling(form: Fields, max_temperature: float) -> SamplingOptions:
    """Read the members that control how a token is drawn. By default the most likely one is."""
    return SamplingOptions(
        temperature=form.number("temperature", 0.0, 0, max_temperature),
        top_p=form.number("top_p", 1.0, 0, 1),
        top_k=max(0, form.integer("top_k", 0, -1, MAX_TOKEN_ID)),
        min_p=form.number("min_p", 0.0, 0, 1),
        seed=form.integer("seed", None, -(2**63), 2**64 - 1),
        frequency_penalty=form.number("frequency_penalty", 0.0, -2, 2),
        presence_penalty=form.number("presence_penalty", 0.0, -2, 2),
        repetition_penalty=form.number("repetition_penalty", 1.0, 0, 100, low_excluded=True),
    )


def _clip_error(error: BadMedia) -> ParleyError:
    """Return OpenAI's error for a clip that cannot be used."""
    size, limit = error.detail.get("size", 0), error.detail.get("limit", 0)
    if error.reason == "too_large" and isinstance(size, int) and isinstance(limit, int):
        message = f"Maximum content size limit ({limit}) exceeded ({size} bytes read)"
        return TooLarge(message, size=size, limit=limit)
    if error.reason in ("unknown_format", "undecodable"):
        return InvalidValue(f"Invalid file format. Supported formats: {FILE_FORMATS}", field=error.field)
    return error
