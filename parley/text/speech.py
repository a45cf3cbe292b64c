"""The form of transcription requests to speech models and of their answers: one row for each family.

A family that reads audio but has no row is prompted in words, like any model that follows instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parley.types import ChatPrompt, Media, Message, PlacedMedia, TokenInfo

MAX_HEADER_CHARACTERS = 64  # a longer header is part of the text

LANGUAGES: Mapping[str, str] = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bs": "Bosnian",
    "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French",
    "gl": "Galician", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "kk": "Kazakh", "kn": "Kannada",
    "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "mi": "Maori", "mk": "Macedonian", "mr": "Marathi",
    "ms": "Malay", "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sr": "Serbian", "sv": "Swedish",
    "sw": "Swahili", "ta": "Tamil", "th": "Thai", "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu",
    "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
QWEN3_ASR_CODES = (
    "ar", "yue", "zh", "cs", "da", "nl", "en", "fil", "fi", "fr", "de", "el", "hi", "hu", "id", "it", "ja", "ko", "mk",
    "ms", "fa", "pl", "pt", "ro", "ru", "es", "sv", "th", "tr", "vi",
)  # fmt: skip


@dataclass(frozen=True)
class SpeechFamily:
    """``languages``: the names of the languages that a request can name, by their codes.

    ``header_start`` and ``header_end``: the marks around the language at the start of the model's answer;
    such a model is trained for transcription and takes no instructions. Empty: it is prompted in words.
    """

    languages: Mapping[str, str]
    header_start: str = ""
    header_end: str = ""

    @property
    def follows_instructions(self) -> bool:
        """Whether the prompt describes the task in words, so that it can also be a translation."""
        return not self.header_end


# Qwen3-ASR's form is that of its processor in Transformers: Qwen3ASRProcessor.apply_transcription_request.
FAMILIES: Mapping[str, SpeechFamily] = {
    "qwen3_asr": SpeechFamily({code: LANGUAGES[code] for code in QWEN3_ASR_CODES}, "language ", "<asr_text>"),
}
INSTRUCTED = SpeechFamily(LANGUAGES)


def speech_family(model_type: str) -> SpeechFamily:
    """Return the form of transcription requests to models of this type."""
    return FAMILIES.get(model_type, INSTRUCTED)


def transcription_chat(family: SpeechFamily, clip: Media, language: str, context: str) -> ChatPrompt:
    """Return the conversation whose answer is the text of a clip.

    ``language``: its name; "" leaves it to the model. ``context``: words that may occur; "" for none.
    """
    system = [Message("system", context)] if context else []
    if family.follows_instructions:
        spoken = f" in {language}" if language else ""
        request = f"Transcribe the speech{spoken}. Answer with the transcript only."
        return ChatPrompt([*system, _spoken_turn(clip, request)])
    turns = [*system, _spoken_turn(clip)]
    if not language:
        return ChatPrompt(turns)
    header = f"{family.header_start}{language}{family.header_end}"
    return ChatPrompt([*turns, Message("assistant", header)], add_generation_prompt=False, continue_final=True)


def translation_chat(clip: Media, language: str, target: str, context: str) -> ChatPrompt:
    """Return the conversation whose answer is the text of a clip in the language ``target``, for a model that follows
    instructions. The rest as in ``transcription_chat``."""
    spoken = f" from {language}" if language else ""
    request = f"Translate the speech{spoken} into {target}. Answer with the translation only."
    return ChatPrompt([*([Message("system", context)] if context else []), _spoken_turn(clip, request)])


def _spoken_turn(clip: Media, text: str = "") -> Message:
    return Message("user", text, media=[PlacedMedia(0, clip)])


class TranscriptReader:
    """Separates the text of an answer from the header that names its language, and from white space around it.

    The pieces that it returns, joined, are the text. ``language``: its name, as asked for or as the model writes it; ""
    while it is unknown. ``hears_nobody``: the model reports that no speech is heard. ``tokens``: those of the text.
    """

    def __init__(self, family: SpeechFamily, language: str = ""):
        self.language = language
        self.hears_nobody = False
        self.tokens: list[TokenInfo] = []
        self._family = family
        self._expects_header = not family.follows_instructions and not language
        self._held_text = ""  # the start of a header, or white space that no text has followed yet
        self._begun = False

    def read_text(self, text: str, tokens: list[TokenInfo]) -> str:
        """Return the part of the text that an answer's next piece completes. ``tokens``: those of the piece."""
        self.tokens += tokens
        self._held_text += text
        if self._expects_header:
            mark_position = self._held_text.find(self._family.header_end, 0, MAX_HEADER_CHARACTERS)
            if mark_position < 0 and len(self._held_text) < MAX_HEADER_CHARACTERS:
                return ""
            self._expects_header = False
            if mark_position >= 0:
                self._cut_header(mark_position)
        return self._take_text()

    def finish_text(self) -> str:
        """Return the text that was held back at the end of the answer: all of it, if it has no header."""
        self._expects_header = False
        return self._take_text()

    def _take_text(self) -> str:
        text = self._held_text if self._begun else self._held_text.lstrip()
        complete = text.rstrip()
        self._held_text = text[len(complete) :]
        self._begun = self._begun or bool(complete)
        return complete

    def _cut_header(self, mark_position: int) -> None:
        """Cut off the header and its tokens, and read the language: its name after "language", or alone in a line."""
        header_end = mark_position + len(self._family.header_end)
        header, self._held_text = self._held_text[:header_end], self._held_text[header_end:]
        line = next(iter(header[:mark_position].strip().splitlines()), "") + " "
        start = self._family.header_start
        name = (line[len(start) :] if line.lower().startswith(start) else line).strip()
        self.hears_nobody = name.lower() == "none"
        self.language = "" if self.hears_nobody else name
        size = len(header.encode())
        while self.tokens and size > 0:
            size -= len(self.tokens.pop(0).raw_bytes)
