"""The kinds and marks of multimodal families, read from config.json and the tokenizer."""

import json

import pytest
from support.multimodal_models import FAMILIES, SAMPLED_FAMILIES, multimodal_folder

from parley.text.media_family import MediaMarks, read_media_family, writer_config
from parley.text.tokens.tokenizer import Tokenizer

# The marks that differ from the one mark that both the chat template and the embeddings of most families have.
OTHER_MARKS = {
    ("aya_vision", "image"): MediaMarks("<image>", "<|IMG_PATCH|>"),
    ("gemma3", "image"): MediaMarks("<start_of_image>", "<image_soft_token>"),
    ("internvl", "video"): MediaMarks("<video>", "<IMG_CONTEXT>"),
    ("ovis2", "image"): MediaMarks("<image>", "<IMG_ATOM>"),
    ("llama4", "image"): MediaMarks("<|image|>", "<|patch|>"),
    ("qianfan_ocr", "image"): MediaMarks("<image>", "<IMG_CONTEXT>"),
    ("smolvlm", "video"): MediaMarks("<video>", "<image>"),
    ("nemotron_h_omni", "video"): MediaMarks("<video>", "<image>"),
} | {
    (family, "video"): MediaMarks("<|video|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>")
    for family in ("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga")
}
OPENING_MARKS = (
    "<|vision_", "<|begin_of_", "<|audio_start|>", "[BEGIN_AUDIO]", "<|IMAGE_START|>", "<|media_begin|>", "<img>",
    "<fim_prefix>", "<｜hy_place▁holder▁no▁100｜>",
)  # fmt: skip


def read_config(family: str) -> dict:
    return json.loads((multimodal_folder(family) / "config.json").read_text())


@pytest.mark.parametrize("family", SAMPLED_FAMILIES)
def test_reads_the_kinds_and_marks_of_a_family(family: str):
    media_family = read_media_family(read_config(family))
    assert media_family is not None
    parts = FAMILIES[family].parts
    assert media_family.kinds == set(parts)
    marks = media_family.read_marks(Tokenizer.from_folder(multimodal_folder(family)))
    for kind, part in parts.items():
        assert marks[kind].prompt_mark in part
        assert marks[kind].placeholder in FAMILIES[family].marks.values()
        assert marks[kind].opening + marks[kind].prompt_mark + marks[kind].closing in part
        has_edges = any(mark in part for mark in OPENING_MARKS) or family == "qwen2_5_omni_thinker"
        assert bool(marks[kind].opening) == has_edges
        if (family, kind) in OTHER_MARKS:
            assert marks[kind] == OTHER_MARKS[family, kind]
        else:
            assert marks[kind].prompt_mark == marks[kind].placeholder
    assert media_family.sees_both_ways == (family in ("gemma3", "gemma4_31b"))
    assert media_family.is_prefix_lm == family.startswith("paligemma")
    has_axes = media_family.has_rope_grids or media_family.canvas_marks is not None
    assert has_axes == ("mrope_section" in json.dumps(read_config(family)))


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_reads_both_names_of_the_placeholder(name: str):
    media_family = read_media_family({"model_type": "llava", name: 32000})
    assert media_family is not None
    assert media_family.placeholder_ids == {"image": 32000}


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "llava"}, {}])
def test_a_config_without_known_media_takes_text_only(config: dict):
    assert read_media_family(config) is None


def test_a_kind_without_its_token_is_left_out():
    media_family = read_media_family({"model_type": "qwen2_vl", "image_token_id": 10**6})
    assert media_family is not None
    assert media_family.read_marks(Tokenizer.from_folder(multimodal_folder("qwen2_vl"))) == {}


@pytest.mark.parametrize("name", ["quantization_config", "quantization"])
def test_quantization_of_a_whole_omni_model_comes_from_its_thinker(name: str):
    config = {"model_type": "qwen2_5_omni", name: {"bits": 4}, "thinker_config": {"model_type": "qwen2_5_omni_thinker"}}
    assert writer_config(config) == {"model_type": "qwen2_5_omni_thinker", name: {"bits": 4}}


@pytest.mark.parametrize(("rate", "kinds"), [(0.0, {"image", "video"}), (0.7, {"image"})])
def test_videos_whose_embeddings_are_pruned_are_not_read(rate: float, kinds: set[str]):
    media_family = read_media_family({"model_type": "nemotron_h_omni", "image_token_id": 5, "video_pruning_rate": rate})
    assert media_family is not None
    assert media_family.kinds == kinds


def test_reads_the_names_that_fields_of_nemotron_had_earlier():
    config = {"model_type": "nemotron_h_omni", "llm_config": {"vocab_size": 9}, "sound_config": {}}
    config |= {"img_context_token_id": 18, "sound_context_token_id": 27}
    assert writer_config(config)["text_config"] == {"vocab_size": 9}
    media_family = read_media_family(config)
    assert media_family is not None
    assert media_family.placeholder_ids == {"image": 18, "video": 18, "audio": 27}
    without_sound = read_media_family(config | {"sound_config": None})
    assert without_sound is not None
    assert without_sound.placeholder_ids == {"image": 18, "video": 18}


GEMMA4_IDS = {"image_token_id": 7, "video_token_id": 8, "audio_token_id": 9}


@pytest.mark.parametrize("without", [{"audio_config": None}, {}])
def test_a_kind_whose_encoder_the_model_does_not_have_is_left_out(without: dict):
    config = {"model_type": "gemma4", "vision_config": {}} | GEMMA4_IDS
    media_family = read_media_family(config | without)
    assert media_family is not None and media_family.kinds == {"image", "video"}
    assert read_media_family(config | {"audio_config": {}}).kinds == {"image", "video", "audio"}
    assert read_media_family(config | {"vision_config": None}) is None


@pytest.mark.parametrize(
    ("model_type", "text_config", "sees_both_ways"),
    [
        ("gemma4", {"use_bidirectional_attention": "vision"}, True),
        ("gemma4", {"use_bidirectional_attention": None}, False),
        ("gemma4", {}, False),
        ("gemma4_unified", {"use_bidirectional_attention": None}, False),
        ("gemma4_unified", {}, True),
    ],
)
def test_the_text_config_of_gemma_4_says_whether_images_see_both_ways(model_type, text_config, sees_both_ways):
    """What its absence means differs between the types, as in Transformers."""
    config = {"model_type": model_type, "vision_config": {}, "text_config": text_config} | GEMMA4_IDS
    assert read_media_family(config).sees_both_ways == sees_both_ways
