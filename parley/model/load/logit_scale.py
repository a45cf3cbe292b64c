"""The factor of logits that Transformers' code for some multimodal models omits.

Aya Vision and Command A Vision are encoders for Cohere's language models, whose logits have a factor (``logit_scale``
of the text config). Granite Speech and Granite Vision 3 (a LLaVA-NeXT) are some for Granite, which has a divisor
(``logits_scaling``). In earlier versions the whole model had that language model with its head, which applies it. Now
it has a head of its own, without it. Greedy answers are the same, but probabilities are not.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

MODEL_TYPES = ("aya_vision", "cohere2_vision", "granite_speech", "granite_speech_plus", "llava", "llava_next")


def scale_forgotten_logits(model: PreTrainedModel) -> None:
    """Make the head of a model of MODEL_TYPES apply the factor. Other models stay as they are."""
    if model.config.model_type not in MODEL_TYPES:
        return
    text_config = model.config.get_text_config()
    factor = 1 / float(getattr(text_config, "logits_scaling", 1.0))
    if text_config.model_type.startswith("cohere"):  # MPT has such a field, too, which Transformers never reads
        factor *= float(text_config.logit_scale)
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _arguments, logits: logits * factor)
