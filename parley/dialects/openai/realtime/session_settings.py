"""The settings of a session, which ``session.update`` changes: members that it names replace those before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.labels import MAX_LABEL
from parley.errors import InvalidValue, Unsupported, excerpt

SessionKind = Literal["realtime", "transcription"]
SESSION_KINDS: tuple[SessionKind, ...] = ("realtime", "transcription")
PCM_FORMAT, RATES = "audio/pcm", (8000, 48_000)
DEFAULT_RATE = 24_000  # Hz
LOGPROBS_INCLUDED = "item.input_audio_transcription.logprobs"
MAX_CONTEXT_CHARACTERS = 100_000
# Members of a session and of ``response.create`` that a request of the Responses API has, too, which reads them.
RESPONSE_MEMBERS = (
    "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "temperature", "max_output_tokens",
)  # fmt: skip
MAX_MEMBERS_BYTES = 1 << 20  # of these as JSON: a session keeps them
NO_LIMIT = "inf"  # as ``max_output_tokens``
MODALITY_SENTENCE = "Output of a session is text: use ['text']. This server has no models that speak."
TURN_SENTENCE = (
    "Turn detection is not supported on this server. Set 'turn_detection' to null, and send input_audio_buffer.commit "
    "at the end of each turn."
)


@dataclass(frozen=True)
class TranscriptionSettings:
    """How committed audio becomes text. ``model``: "" for the session's."""

    model: str = ""
    language: str = ""
    prompt: str = ""

    def show_transcription(self) -> dict[str, str | None]:
        """Return them as an event has them."""
        return {"model": self.model, "language": self.language or None, "prompt": self.prompt}


@dataclass(frozen=True)
class SessionSettings:
    """All settings. ``rate``: of the audio, in Hz; ``response_members``: of requests of the Responses API."""

    kind: SessionKind
    model: str = ""
    rate: int = DEFAULT_RATE
    transcription: TranscriptionSettings | None = None
    wants_logprobs: bool = False
    response_members: dict[str, Any] = field(default_factory=dict)

    def apply_update(self, session: Fields) -> SessionSettings:
        """Return the settings after an update. Raises BadRequest."""
        kind = session.string("type", self.kind, allowed=SESSION_KINDS)
        changed = replace(
            self,
            kind="transcription" if kind == "transcription" else "realtime",
            model=session.string("model", self.model, cap=MAX_LABEL),
            wants_logprobs=_read_include(session) if session.has_value("include") else self.wants_logprobs,
            response_members=self.response_members | read_response_members(session),
        )
        check_modalities(session)
        if session.has_value("prompt"):
            raise unsupported_member_error(session, "prompt", "Prompts that the service keeps are")
        audio = session.object("audio")
        audio_input = None if audio is None else audio.object("input")
        return changed if audio_input is None else changed._apply_audio_update(audio_input)

    def _apply_audio_update(self, audio: Fields) -> SessionSettings:
        """Return the settings after an update of the audio input. Raises BadRequest."""
        if audio.has_value("turn_detection"):
            raise Unsupported(TURN_SENTENCE, field=audio.member_path("turn_detection"))
        if audio.has_value("noise_reduction"):
            raise unsupported_member_error(audio, "noise_reduction", "Noise reduction is")
        rate, transcription = self.rate, self.transcription
        if (audio_format := audio.object("format")) is not None:
            name = audio_format.string("type", PCM_FORMAT, cap=MAX_LABEL)
            if name != PCM_FORMAT:
                path = audio_format.member_path("type")
                raise Unsupported(f"Unsupported value: {excerpt(name)}. Audio must be '{PCM_FORMAT}'.", field=path)
            rate = audio_format.integer("rate", DEFAULT_RATE, *RATES)
        if (members := audio.object("transcription")) is not None:
            transcription = TranscriptionSettings(
                members.string("model", "", cap=MAX_LABEL),
                members.string("language", "", cap=64),
                members.string("prompt", "", cap=MAX_CONTEXT_CHARACTERS),
            )
        elif audio.is_null("transcription"):
            transcription = None
        return replace(self, rate=rate, transcription=transcription)

    def show_session(self, session_id: str, expires_at: int) -> dict[str, Any]:
        """Return the session as an event has it."""
        session: dict[str, Any] = {"type": self.kind, "object": "realtime.session", "id": session_id}
        if self.kind == "transcription":
            session["object"] = "realtime.transcription_session"
        else:
            session |= {
                "model": self.model,
                "output_modalities": ["text"],
                "instructions": "",
                "tools": [],
                "tool_choice": "auto",
                "max_output_tokens": NO_LIMIT,
                **self.response_members,
                "truncation": "disabled",
                "tracing": None,
                "prompt": None,
            }
        transcription = None if self.transcription is None else self.transcription.show_transcription()
        audio_format = {"type": PCM_FORMAT, "rate": self.rate}
        audio = {
            "format": audio_format,
            "transcription": transcription,
            "noise_reduction": None,
            "turn_detection": None,
        }
        include = [LOGPROBS_INCLUDED] if self.wants_logprobs else None
        return session | {"audio": {"input": audio}, "include": include, "expires_at": expires_at}


def read_response_members(body: Fields) -> dict[str, Any]:
    """Return the members about responses that are present. Those of the Responses API are checked with a response.
    Raises BadRequest."""
    members = {name: body.raw_value(name) for name in RESPONSE_MEMBERS if body.has_value(name)}
    limit = members.get("max_output_tokens")
    if isinstance(limit, str) and limit != NO_LIMIT:
        raise body.mistyped_member("max_output_tokens", "an integer")
    for name, value in members.items():
        if (size := len(encode_json(value))) > MAX_MEMBERS_BYTES:
            raise body.member_error(name, f"has {size} bytes; at most {MAX_MEMBERS_BYTES} are allowed.")
    return members


def check_modalities(body: Fields) -> None:
    """Refuse answers in audio. Raises Unsupported."""
    modalities = body.strings("output_modalities", cap=2, total=64)
    if modalities not in ([], ["text"]):
        raise Unsupported(MODALITY_SENTENCE, field=body.member_path("output_modalities"))


def _read_include(session: Fields) -> bool:
    for name in session.strings("include", cap=16, total=MAX_LABEL):
        if name != LOGPROBS_INCLUDED:
            message = f"Invalid value in 'include': {excerpt(name)}. The supported value is '{LOGPROBS_INCLUDED}'."
            raise InvalidValue(message, field="session.include")
    return bool(session.raw_value("include"))
