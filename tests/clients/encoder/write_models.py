"""Writes small encoders and classifiers with random weights. Arguments: the folder for them."""

import json
import sys
from pathlib import Path

import torch
from support import tiny_models
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from parley.model import load  # noqa: F401  (makes Transformers load without torchvision)

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MODERN_SIZES = SIZES | {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
LABELS = {0: "bad", 1: "fair", 2: "good"}
MODELS = {  # by name: model type, class, members of the config
    "encoder": ("modernbert", AutoModel, MODERN_SIZES),
    "classifier": ("roberta", AutoModelForSequenceClassification, SIZES | {"id2label": LABELS}),
    "reranker": ("bert", AutoModelForSequenceClassification, SIZES | {"id2label": {0: "LABEL_0"}}),
}
# The encoder's, as sentence-transformers writes them; Cohere's kinds of input name them.
PROMPTS = {"search_query": "query: ", "search_document": "document: "}
OPENING, CLOSING = "<|im_start|>", "<|im_end|>"


def write_pair_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that joins two texts as BERT's does."""
    tiny_models.write_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{OPENING} $A {CLOSING}",
        pair=f"{OPENING}:0 $A:0 {CLOSING}:0 $B:1 {CLOSING}:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in (OPENING, CLOSING)],
    )
    tokenizer.save(file)


def main() -> None:
    home = Path(sys.argv[1])
    for name, (kind, model_class, members) in MODELS.items():
        torch.manual_seed(5)
        model = model_class.from_config(AutoConfig.for_model(kind, **members), dtype=torch.float32)
        tiny_models.write_random_model(home / name, model, seed=5, dtype="float32")
        write_pair_tokenizer(home / name)
    (home / "encoder" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))


if __name__ == "__main__":
    main()
