"""The kinds of projector files that are read, by their names in the metadata."""

from __future__ import annotations

from parley.gguf.header import GgufError, GgufModel
from parley.gguf.projectors.gemma_4_projectors import GEMMA_4, GEMMA_4_UNIFIED
from parley.gguf.projectors.gemma_projectors import GEMMA_3
from parley.gguf.projectors.glm_projectors import GLM_4_V
from parley.gguf.projectors.granite_projectors import GRANITE_SPEECH
from parley.gguf.projectors.janus_projectors import JANUS
from parley.gguf.projectors.kimi_projectors import KIMI_K2_5
from parley.gguf.projectors.llava_projectors import LLAVA
from parley.gguf.projectors.minicpm_projectors import MINICPM_V_4_6, MINICPM_V_4_7
from parley.gguf.projectors.omni_projectors import QWEN_2_5_OMNI
from parley.gguf.projectors.paddle_projectors import PADDLE_OCR
from parley.gguf.projectors.pixtral_projectors import LIGHT_ON_OCR, PIXTRAL
from parley.gguf.projectors.projector import Projector
from parley.gguf.projectors.projector_file import ProjectorFile
from parley.gguf.projectors.qwen_3_omni_projectors import QWEN_3_ASR, QWEN_3_OMNI
from parley.gguf.projectors.qwen_projectors import EXAONE_4_5, QWEN_2_5_VL, QWEN_2_VL, QWEN_3_VL
from parley.gguf.projectors.refused_projectors import REFUSED_PROJECTORS
from parley.gguf.projectors.speech_projectors import AUDIO_FLAMINGO_3, QWEN_2_AUDIO, VOXTRAL
from parley.gguf.projectors.tiled_projectors import IDEFICS_3, INTERN_VL, LFM_2_VL, LLAMA_4

PROJECTORS = {
    "exaone4_5": EXAONE_4_5,
    "gemma3": GEMMA_3,
    "gemma4uv": GEMMA_4_UNIFIED,
    "gemma4v": GEMMA_4,
    "glm4v": GLM_4_V,
    "granite_speech": GRANITE_SPEECH,
    "idefics3": IDEFICS_3,
    "internvl": INTERN_VL,
    "janus_pro": JANUS,
    "kimik25": KIMI_K2_5,
    "lfm2": LFM_2_VL,
    "lightonocr": LIGHT_ON_OCR,
    "llama4": LLAMA_4,
    "minicpmv4_6": MINICPM_V_4_6,
    "minicpmv4_7": MINICPM_V_4_7,
    "mlp": LLAVA,
    "musicflamingo": AUDIO_FLAMINGO_3,
    "paddleocr": PADDLE_OCR,
    "pixtral": PIXTRAL,
    "qwen2a": QWEN_2_AUDIO,
    "qwen2.5o": QWEN_2_5_OMNI,
    "qwen2vl_merger": QWEN_2_VL,
    "qwen2.5vl_merger": QWEN_2_5_VL,
    "qwen3a": QWEN_3_ASR,
    "qwen3vl_merger": QWEN_3_VL,
    "voxtral": VOXTRAL,
}
KIND_KEYS = ("clip.vision.projector_type", "clip.projector_type", "clip.audio.projector_type")
LLAVA_KEY = "clip.has_llava_projector"  # of early files, which name no kind


def find_projector(model: GgufModel) -> Projector:
    """Return the kind of a projector file. Raises GgufError if it is none that is read."""
    name = model.paths[0].name
    if "mmproj" not in (model.metadata.get("general.type"), model.metadata.get("general.architecture")) and (
        model.metadata.get("general.architecture") != "clip"
    ):
        raise GgufError(f"{name} is no image or audio encoder")
    default = "mlp" if model.metadata.get(LLAVA_KEY) is True else None
    kind = next((model.metadata[key] for key in KIND_KEYS if model.metadata.get(key)), default)
    if isinstance(kind, str) and kind in REFUSED_PROJECTORS:
        raise GgufError(f"{name} is an encoder of the kind {kind}, which is not read: {REFUSED_PROJECTORS[kind]}")
    if not isinstance(kind, str) or kind not in PROJECTORS:
        kinds = ", ".join(PROJECTORS)
        raise GgufError(f"{name} is an encoder of the kind {str(kind)[:100]}, which is not read; {kinds} are")
    projector = PROJECTORS[kind]
    if kind == "qwen3vl_merger" and model.metadata.get("clip.audio.projector_type") == "qwen3a":
        return QWEN_3_OMNI
    return projector.variant(ProjectorFile(model, projector.modality)) or projector


def open_projector(model: GgufModel) -> tuple[Projector, ProjectorFile]:
    """Return the kind of a projector file, and its readers. Raises GgufError if it is none that is read."""
    projector = find_projector(model)
    return projector, ProjectorFile(model, projector.modality)
