"""Speech models: the conversation that asks for the text of a clip, and the text that an answer consists of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.text.speech import TranscriptReader, speech_family, transcription_chat, translation_chat
from parley.types import ChatPrompt, Media, Message, PlacedMedia, TokenInfo, UploadedMedia

CLIP = Media("audio", UploadedMedia(b"RIFF"), "file")
SPOKEN = [PlacedMedia(0, CLIP)]
QWEN, OTHER = speech_family("qwen3_asr"), speech_family("qwen2_audio")


def read_pieces(
    pieces: list[str], language: str = "", model_type: str = "qwen3_asr"
) -> tuple[TranscriptReader, list[str]]:
    reader = TranscriptReader(speech_family(model_type), language)
    texts = [reader.read_text(piece, [TokenInfo(0, piece, piece.encode())]) for piece in pieces]
    return reader, [*texts, reader.finish_text()]


def test_qwen3_asr_gets_the_clip_and_the_context_without_instructions():
    assert transcription_chat(QWEN, CLIP, "", "") == ChatPrompt([Message("user", "", media=SPOKEN)])
    assert transcription_chat(QWEN, CLIP, "English", "Zaphod") == ChatPrompt(
        [
            Message("system", "Zaphod"),
            Message("user", "", media=SPOKEN),
            Message("assistant", "language English<asr_text>"),
        ],
        add_generation_prompt=False,
        continue_final=True,
    )


def test_other_models_are_asked_in_words():
    request = "Transcribe the speech in German. Answer with the transcript only."
    assert transcription_chat(OTHER, CLIP, "German", "") == ChatPrompt([Message("user", request, media=SPOKEN)])
    request = "Translate the speech into English. Answer with the translation only."
    assert translation_chat(CLIP, "", "English", "Zaphod") == ChatPrompt(
        [Message("system", "Zaphod"), Message("user", request, media=SPOKEN)]
    )
    assert OTHER.follows_instructions and not QWEN.follows_instructions


@pytest.mark.parametrize(
    ("answer", "language", "text"),
    [
        ("language English<asr_text>Hello there.", "English", "Hello there."),
        ("language Chinese<asr_text> 你好\n", "Chinese", "你好"),
        ("language None<asr_text>", "", ""),
        ("language <asr_text>Hi", "", "Hi"),
        ("\nEnglish\nx<asr_text>Hi", "English", "Hi"),
        ("<asr_text>Hi <asr_text>", "", "Hi <asr_text>"),
        ("Hello there.", "", "Hello there."),
        ("x" * 100 + "<asr_text>Hi", "", "x" * 100 + "<asr_text>Hi"),
        ("", "", ""),
        ("  \n", "", ""),
    ],
)
def test_header_of_an_answer_names_the_language(answer, language, text):
    for size in (1, 3, 7, 200):
        reader, pieces = read_pieces([answer[i : i + size] for i in range(0, len(answer), size)])
        assert ("".join(pieces), reader.language) == (text, language)
    assert reader.hears_nobody == answer.startswith("language None")


def test_answer_has_no_header_if_the_language_is_given():
    reader, pieces = read_pieces(["Hel", "lo <asr_text>"], "English")
    assert (pieces, reader.language) == (["Hel", "lo <asr_text>", ""], "English")
    assert read_pieces(["Hel", "lo"], model_type="qwen2_audio")[1] == ["Hel", "lo", ""]


@given(st.lists(st.text("ab \n<asr_text>language None", max_size=12), max_size=12))
def test_pieces_joined_are_the_whole_text(pieces):
    whole = read_pieces(["".join(pieces)])
    parts = read_pieces(pieces)
    assert "".join(parts[1]) == "".join(whole[1]) and parts[0].language == whole[0].language
    assert "".join(parts[1]) == "".join(parts[1]).strip()


def test_tokens_of_the_header_are_not_those_of_the_text():
    reader, _ = read_pieces(["language", " English", "<asr_text>", "Hel", "lo"])
    assert [token.text for token in reader.tokens] == ["Hel", "lo"]
    assert [token.text for token in read_pieces(["Hel", "lo"])[0].tokens] == ["Hel", "lo"]
