"""Kinds of projector files that llama.cpp knows and that are refused, each with the reason."""

from __future__ import annotations

OTHER_CODE = "with images its model runs through Transformers' code, for which GGUF files are not read"
FOLDER_ONLY = "parley reads this encoder from the folder of its model only"
NO_ENCODER = "parley has no such encoder"
# By the names in ``clip.projector_type``
REFUSED_PROJECTORS = {
    "adapter": NO_ENCODER,  # GLM-Edge
    "cogvlm": NO_ENCODER,
    "deepseekocr": NO_ENCODER,
    "dots_ocr": NO_ENCODER,
    "gemma3na": FOLDER_ONLY,
    "gemma3nv": FOLDER_ONLY,
    "glma": FOLDER_ONLY,
    "granite4_vision": OTHER_CODE,
    "hunyuanocr": OTHER_CODE,
    "hunyuanvl": OTHER_CODE,
    "kimivl": NO_ENCODER,
    "ldp": NO_ENCODER,  # MobileVLM
    "ldpv2": NO_ENCODER,
    "lfm2a": NO_ENCODER,
    "meralion": NO_ENCODER,
    "mimovl": NO_ENCODER,
    "nemotron_v2_vl": FOLDER_ONLY,
    "parakeet": FOLDER_ONLY,
    "phi4": NO_ENCODER,  # Phi-4-reasoning-vision
    "resampler": NO_ENCODER,  # MiniCPM-V 2.5 to 4.5
    "step3vl": FOLDER_ONLY,
    "ultravox": NO_ENCODER,
    "yasa2": NO_ENCODER,
    "youtuvl": NO_ENCODER,
}
