"""Architectures of GGUF files that llama.cpp has a name for and that are refused, each with the reason."""

from __future__ import annotations

DIFFUSION = "it writes by diffusion, and only models that write one token after the other are served"
DRAFT = "it only drafts tokens for another model, whose states it reads"
RECURRENT = "its layers keep a state of a kind that parley does not compute"
# By the names in ``general.architecture``
REFUSED_ARCHITECTURES = {
    "arctic": "its layers compute an MLP and, of their input, a mixture of experts as well",
    "arwkv7": RECURRENT,
    "chameleon": "queries and keys have LayerNorms for each head, and images are tokens of its vocabulary",
    "cogvlm": "it has other weights for the tokens of images than for those of text",
    "dflash": DRAFT,
    "diffusion-gemma": DIFFUSION,
    "dream": DIFFUSION,
    "eagle3": DRAFT,
    "gemma4-assistant": DRAFT,
    "gptj": "llama.cpp has this name, but neither converts nor runs GPT-J; its folder is served",
    "grok": "its routers limit their logits, and its mixtures stand beside MLPs",
    "grovemoe": "its experts share further experts in groups",
    "jais": "it has slopes instead of positions, and gates in its MLPs; Jais 2 is read",
    "llada": DIFFUSION,
    "llada-moe": DIFFUSION,
    "neo-bert": "parley does not compute this encoder; bert, modern-bert and nomic-bert are read",
    "plamo": "its attention and its gated MLP read the same norm",
    "plamo2": RECURRENT,
    "plamo3": "its layers have norms before and after each part, and queries and keys as well",
    "refact": "it has slopes instead of positions, and gates in its MLPs",
    "rnd1": DIFFUSION,
    "rwkv6": RECURRENT,
    "rwkv6qwen2": RECURRENT,
    "rwkv7": RECURRENT,
    "t5": "it is an encoder-decoder, and only decoders are served",
    "t5encoder": "it is the encoder of an encoder-decoder, and makes no vectors of texts by itself",
    "wavtokenizer-dec": "it makes audio of tokens, and no text",
}
