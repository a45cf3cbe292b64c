"""lm-evaluation-harness: choices and texts by likelihood, and generated answers. Arguments: HOST:PORT MODEL."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}

import lm_eval

address, model = sys.argv[1:]
CAPITALS = {"France": "Paris", "Norway": "Oslo", "Sweden": "Stockholm", "Japan": "Tokyo", "Spain": "Madrid"}
TOKENIZER = Path(os.environ["CLIENTS_SOURCE"]).parents[1] / "parley" / "demo" / "model"

rows = Path(tempfile.mkdtemp()) / "capitals.jsonl"
rows.write_text("".join(json.dumps({"country": name, "city": city}) + "\n" for name, city in CAPITALS.items()))
COMMON = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": list(CAPITALS.values()),
    "doc_to_target": "{{city}}",
    "metric_list": [{"metric": "acc"}],
}
ROLLING = {
    "task": "rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "The capital of {{country}} is {{city}}.",
    "metric_list": [{"metric": "word_perplexity"}],
}
ANSWERS = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_text": "What is the capital of {{country}}?",
    "doc_to_target": "The capital of {{country}} is {{city}}.",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 30, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(kind: str, path: str, *tasks: dict, **options) -> dict:
    """Returns the metrics of each task."""
    arguments = {"model": model, "base_url": f"http://{address}{path}", "num_concurrent": 2, "max_retries": 1}
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments | options,
        tasks=[COMMON | task for task in tasks],
        bootstrap_iters=0,
        apply_chat_template=kind == "local-chat-completions",
    )
    return results["results"]


by_text = evaluate(
    "local-completions", "/v1/completions", CHOICES, ROLLING, tokenizer_backend="huggingface", tokenizer=str(TOKENIZER)
)
assert by_text["choices"]["acc,none"] == 1
assert 1 < by_text["rolling"]["word_perplexity,none"] < 1000
by_chat = evaluate("local-chat-completions", "/v1/chat/completions", ANSWERS)
assert by_chat["answers"]["exact_match,none"] == 1
print("good")
