"""Prompts with images, videos and sound have the very tokens of Transformers' processors."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pytest
from support.multimodal_models import FAMILIES, SAMPLED_FAMILIES, multimodal_folder

from parley.errors import InvalidValue
from parley.model.media_input.processor import ItemProcessor
from parley.text.media_prompt import find_media_items
from parley.text.parsing.content_parts import content_parts
from parley.text.text_pipeline import TextPipeline
from parley.types import ChatPrompt, EncodedMedia, Media, MediaKind, Message, PlacedMedia, ProcessedMedia, TextPrompt
from parley.types.media import lead_length

SIZES = {"wide": (40, 90), "tall": (120, 33), "small": (30, 31)}
# Perception LM's processor cannot read two images with different numbers of tiles at once
IMAGE_FAMILIES = sorted(
    family for family, shape in SAMPLED_FAMILIES.items() if "image" in shape.parts and family != "perception_lm"
)


@cache
def load_processor(family: str) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(multimodal_folder(family))


@cache
def item_processor(family: str) -> ItemProcessor:
    return ItemProcessor(multimodal_folder(family))


@cache
def load_pipeline(family: str) -> TextPipeline:
    return TextPipeline.from_folder(multimodal_folder(family))


@cache
def image(size: str) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(len(size)).integers(0, 256, (*SIZES[size], 3), np.uint8)
    return Image.fromarray(pixels)


def process_image(family: str, size: str) -> ProcessedMedia:
    """Return what a media process does: the replacement that the processor makes of the image alone."""
    processed = item_processor(family).process_image(image(size), {})
    return item_processor(family).describe_item("image", sha256(size.encode()).digest(), processed)


def placed(position: int, kind: MediaKind = "image") -> PlacedMedia:
    return PlacedMedia(position, Media(kind, EncodedMedia(""), "content"))


def chat_of(text: str, positions: list[int]) -> ChatPrompt:
    return ChatPrompt(
        [Message("system", "Be brief."), Message("user", text, media=[placed(position) for position in positions])]
    )


def expected_ids(family: str, chat: ChatPrompt, sizes: list[str]) -> list[int]:
    """Return the ids that Transformers' processor makes of the conversation and its images."""
    processor = load_processor(family)
    turns = [
        {"role": turn.role, "content": content_parts(turn.content, turn.media) if turn.media else turn.content}
        for turn in chat.messages
    ]
    template_owner = processor if processor.chat_template else processor.tokenizer  # Phi-4-multimodal's has none
    text = template_owner.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    images = [image(size) for size in sizes]
    if family in ("gemma3", "idefics3", "smolvlm"):
        images = [images]
    batch = processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt")
    return batch["input_ids"][0].tolist()


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
@pytest.mark.parametrize(
    ("text", "positions", "sizes"),
    [
        ("What is this?", [0], ["wide"]),
        ("What is this?\n", [14], ["tall"]),
        ("Compare  and \n please", [8, 13], ["small", "wide"]),
        ("three", [0, 0, 5], ["small", "small", "tall"]),
    ],
    ids=["start", "end", "middle", "three"],
)
def test_tokens_of_images_are_those_of_the_processor(family, text, positions, sizes):
    chat = chat_of(text, positions)
    items = [process_image(family, size) for size in sizes]
    prepared = load_pipeline(family).prepare_prompt(chat, media=items)
    expected, lead = expected_ids(family, chat, sizes), lead_length(prepared.media)
    if family == "mllama":  # whose processor writes BOS where a template does not
        expected = expected[1:]
        assert lead % 16 == 0 and lead >= sum(item.embedding_count for item in items)
        assert [prepared.token_ids[item.seen_from] for item in prepared.media] == [463] * len(items)
    assert prepared.token_ids[lead:] == expected
    marks = [items[0].placeholder, *items[0].other_placeholders]
    ids = list(map(load_pipeline(family).tokenizer.find_token, marks))
    places = [place for place, token_id in enumerate(prepared.token_ids) if token_id in ids and not 0 < lead <= place]
    assert places == [
        item.start + run.offset + k for item in prepared.media for run in item.runs for k in range(run.count)
    ]
    assert [item.digest for item in prepared.media] == [item.digest for item in items]
    assert all(item.runs[0].offset == 0 for item in prepared.media)
    assert all(item.runs[-1].offset + item.runs[-1].count == item.count for item in prepared.media)


@pytest.mark.parametrize("is_chat", [True, False])
def test_tokens_that_lead_a_prompt_are_counted(is_chat):
    """/tokenize counts what the model reads."""
    pipeline, items = load_pipeline("mllama"), [process_image("mllama", "small")]
    prompt = chat_of("What is this?", [0]) if is_chat else TextPrompt("What is this?", media=[placed(0)])
    text, ids, spans = pipeline.tokenize_prompt(prompt, media=items)
    prepared = pipeline.prepare_prompt(prompt, media=items)
    assert ids == prepared.token_ids and len(spans) == len(ids)
    lead = lead_length(prepared.media)
    assert lead > 0 and set(spans[:lead]) == {(0, 0)}
    written = {place: text[slice(*span)] for place, span in enumerate(spans) if span[0] < span[1]}
    assert written == {place: pipeline.tokenizer.decode([ids[place]], skip_special=False) for place in written}
    assert len(written) > 3
    assert pipeline.tokenize_prompt(prompt, with_spans=False, media=items)[1:] == (ids, [])


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3"])
def test_a_mark_that_a_client_writes_is_text(family):
    pipeline = load_pipeline(family)
    mark = pipeline.media_marks["image"].prompt_mark
    item = process_image(family, "small")
    with_mark = pipeline.prepare_prompt(chat_of(f"Is {mark} a mark?", [0]), media=[item])
    assert len(with_mark.media) == 1
    assert with_mark.media[0].embedding_count == item.embedding_count
    assert mark in pipeline.tokenizer.decode(with_mark.token_ids[with_mark.media[0].end :], skip_special=False)


def test_model_that_reads_images_and_sound_separately_refuses_both_in_one_prompt():
    """In a prompt with images, Phi-4-multimodal projects sound in another way."""
    pipeline, image_item = load_pipeline("phi4_multimodal"), process_image("phi4_multimodal", "small")
    clip = ProcessedMedia("audio", b"clip", "<|audio|>", "<|audio|>", 1)
    chat = ChatPrompt([Message("user", "What is this?", media=[placed(0), placed(5, "audio")])])
    with pytest.raises(
        InvalidValue, match=r"^The prompt has image and audio clip, but this model reads one kind of media"
    ):
        pipeline.prepare_prompt(chat, media=[image_item, clip])
    chat = ChatPrompt([Message("user", "What is this?", media=[placed(5, "audio")])])
    assert pipeline.prepare_prompt(chat, media=[clip]).media[0].digest == b"clip"


def test_a_client_with_trusted_marks_cannot_add_a_place_for_an_image():
    pipeline = TextPipeline.from_folder(multimodal_folder("qwen2_vl"), trust_marks=True)
    with pytest.raises(InvalidValue, match=r"Found more '<\|image_pad\|>' placeholders"):
        pipeline.prepare_prompt(chat_of("<|image_pad|>", [0]), media=[process_image("qwen2_vl", "small")])


def test_a_plain_text_has_replacements_at_their_places():
    pipeline, item = load_pipeline("llava"), process_image("llava", "small")
    prompt = TextPrompt("before  after", media=[placed(7)])
    prepared = pipeline.prepare_prompt(prompt, media=[item])
    ids = [pipeline.tokenizer.encode(text, special) for text, special in (("before ", True), (" after", False))]
    middle = [pipeline.tokenizer.find_token("<image>")] * item.embedding_count
    assert prepared.token_ids == [*ids[0], *middle, *ids[1]]
    with_mark = TextPrompt("before <image> after", media=[placed(0)])
    assert pipeline.prepare_prompt(with_mark, media=[item]).token_ids == prepared.token_ids
    with pytest.raises(InvalidValue, match="Found more '<image>'"):
        pipeline.prepare_prompt(msgspec.structs.replace(prompt, text="<image>" + with_mark.text), media=[item])


def test_an_image_in_a_plain_text_has_the_tokens_that_a_template_writes_around_it():
    pipeline, item = load_pipeline("qwen2_vl"), process_image("qwen2_vl", "small")
    prompt = TextPrompt("before  after", media=[placed(7)])
    token_ids = pipeline.prepare_prompt(prompt, media=[item]).token_ids
    text = f"before {FAMILIES['qwen2_vl'].parts['image']} after"
    assert token_ids == load_processor("qwen2_vl")(text=[text], images=[image("small")])["input_ids"][0]
    with_marks = TextPrompt(text, media=[placed(0)])
    assert pipeline.prepare_prompt(with_marks, media=[item]).token_ids == token_ids


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("caption en", 0, "<image><image><|endoftext|>caption en\n"),
        ("<image>caption en", 0, "<image><image><|endoftext|>caption en\n"),
        ("see  now", 4, "see <image><image><|endoftext|> now\n"),
    ],
)
def test_bos_stands_after_the_images_of_a_prompt_that_is_read_as_a_prefix(text, position, expected):
    """As PaliGemma's processor writes it. The tokenizer does not add another one."""
    pipeline = load_pipeline("llava")
    item = ProcessedMedia("image", b"cat", "<image><image>", "<image>", 2, text_edges=("<|endoftext|>", "\n"))
    prompt = TextPrompt(text, media=[placed(position)])
    token_ids = pipeline.prepare_prompt(prompt, media=[item]).token_ids
    assert token_ids == pipeline.tokenizer.encode(expected, add_special_tokens=False)
    assert pipeline.tokenize_prompt(prompt, media=[item])[:2] == (expected, token_ids)
    whole = ChatPrompt([Message("user", text, media=[placed(position)])], rendered=True, add_special_tokens=True)
    assert pipeline.prepare_prompt(whole, media=[item]).token_ids == pipeline.tokenize_prompt(whole, media=[item])[1]
    without = pipeline.prepare_prompt(TextPrompt("caption en")).token_ids
    assert without == pipeline.tokenizer.encode("caption en", add_special_tokens=True)


def test_a_template_that_reads_no_parts_gets_marks_in_lines():
    pipeline = load_pipeline("llava")
    plain = "{% for message in messages %}[{{ message['content'] | trim }}]{% endfor %}"
    template = type(pipeline.template)({"default": plain}, media_marks={"image": "<image>"})
    text = template.render_conversation(chat_of("What is this?", [0]))
    assert text == "[Be brief.][<image>\nWhat is this?]"


def test_a_template_that_reads_parts_for_images_alone_reads_them_as_parts():
    pipeline = load_pipeline("llava")
    source = """{% for turn in messages %}{% if turn['content'] is string %}{{ turn['content'] }}{% else %}
        {%- for part in turn['content'] %}{{ part['text'] if part['type'] == 'text' else '(<image>)' }}{% endfor %}
        {%- endif %}{% endfor %}"""
    marks = {"image": "<image>", "video": "<video>"}
    template = type(pipeline.template)({"default": source}, media_marks=marks)
    turns = [Message("user", "See", media=[placed(0)]), Message("user", "Play", media=[placed(0, "video")])]
    assert template.render_conversation(ChatPrompt(turns[:1])) == "(<image>)See"
    assert template.render_conversation(ChatPrompt(turns)) == "<image>\nSee<video>\nPlay"


def test_runs_follow_the_grids_of_a_video():
    item = ProcessedMedia("video", b"v" * 32, "", "<v>", 12, [(1, 2, 3), (1, 2, 3)], [1.0, 2.0])
    ids = [7, 1, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1, 1, 1, 9]
    [media_item] = find_media_items(ids, [item], {"<v>": 1}.get)
    assert (media_item.start, media_item.count) == (1, 13)
    assert [(run.offset, run.count, run.grid, run.frame_step) for run in media_item.runs] == [
        (0, 6, (1, 2, 3), 1.0),
        (7, 6, (1, 2, 3), 2.0),
    ]


def test_a_numbered_grid_lies_between_two_more_embeddings():
    """Of HunyuanOCR: two rows of two columns, with a mark after each row."""
    item = ProcessedMedia("image", b"i" * 32, "", "<i>", 8, [(1, 2, 3)], [1.0], has_numbered_grid=True)
    [media_item] = find_media_items([7, *[1] * 8, 9], [item], {"<i>": 1}.get)
    assert (media_item.start, media_item.count) == (1, 8)
    assert [(run.offset, run.count, run.grid, run.is_numbered) for run in media_item.runs] == [
        (0, 1, None, False),
        (1, 6, (1, 2, 3), True),
        (7, 1, None, False),
    ]


def test_a_final_turn_with_an_image_can_be_continued():
    pipeline = load_pipeline("qwen2_vl")
    chat = ChatPrompt(
        [Message("user", "Go on."), Message("assistant", "I see", media=[placed(0)])], continue_final=True
    )
    item = process_image("qwen2_vl", "small")
    prepared = pipeline.prepare_prompt(chat, media=[item])
    assert pipeline.tokenizer.decode(prepared.token_ids[prepared.media[0].end :]) == "I see"
