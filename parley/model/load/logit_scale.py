"""The factor of logits that Transformers' code for two multimodal models omits.

Aya Vision and Command A Vision are encoders for Cohere's language models, whose logits have a factor (``logit_scale``
of the text config). Until version 4.52 the whole model had that language model with its head, which applies the factor.
Since then it has a head of its own, without it. Greedy answers are the same, but probabilities are not.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

MODEL_TYPES = ("aya_vision", "cohere2_vision")


def scale_forgotten_logits(model: PreTrainedModel) -> None:
    """Make the head of a model of MODEL_TYPES multiply its logits by ``logit_scale``. Other models stay as they are."""
    if model.config.model_type not in MODEL_TYPES:
        return
    factor = float(getattr(model.config.get_text_config(), "logit_scale", 1.0))
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _arguments, logits: logits * factor)
