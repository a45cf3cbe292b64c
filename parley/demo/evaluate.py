"""The held-out evaluation of an exported model: exact accuracy of the greedy answer, task by task.

An answer counts if it equals the corpus's answer completely, including the thinking block and the end mark. Instead of
generating, one pass over prompt and expected answer checks that every token is the most likely one, which is the same
condition. Only stories have many correct answers: they are generated and matched against the story grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from parley.demo import corpus, world
from parley.demo.export import load_demo_network
from parley.demo.network import DemoNetwork
from parley.demo.template import END_OF_TEXT, render_pieces
from parley.demo.tokenizer import END_OF_TURN, require_token_id

REQUIRED_ACCURACY = 0.9
STORY_TOKENS = 160


@dataclass(frozen=True)
class Score:
    """Results of a task: correct answers, questions, and different keys among the questions."""

    right: int
    asked: int
    keys: int

    @property
    def accuracy(self) -> float:
        """Return the share of correct answers."""
        return self.right / self.asked


def prompt_and_answer(sample: corpus.Sample) -> tuple[str, str]:
    """Return the prompt of a sample, and the text that the model should write next."""
    if sample.text:
        return sample.text[: sample.prompt], sample.text[sample.prompt :]
    pieces = [text for text, _ in render_pieces(sample.messages, sample.tools, sample.thinking)]
    # The last pieces of an assistant message: its opening, the thinking block, its content, a line end.
    answer_start = len(pieces) - (3 if sample.thinking else 2)
    return "".join(pieces[:answer_start]), "".join(pieces[answer_start:-1])


@torch.no_grad()
def _writes_answer(network: DemoNetwork, tokenizer: Tokenizer, prompt: str, answer: str) -> bool:
    prompt_ids, answer_ids = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
    hidden = network(torch.tensor([prompt_ids + answer_ids]))[0, len(prompt_ids) - 1 : -1]
    return network.logits(hidden).argmax(-1).tolist() == answer_ids


@torch.no_grad()
def generate_greedy(network: DemoNetwork, tokenizer: Tokenizer, prompt: str, limit: int = STORY_TOKENS) -> str:
    """Return the greedy continuation of a prompt, without a KV cache; good enough for a few short texts."""
    ids = tokenizer.encode(prompt).ids
    start, ends = len(ids), [require_token_id(tokenizer, mark) for mark in (END_OF_TURN, END_OF_TEXT)]
    while len(ids) < start + limit:
        ids.append(int(network.logits(network(torch.tensor([ids]))[0, -1]).argmax()))
        if ids[-1] in ends:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def is_story(text: str, example: str) -> bool:
    """Whether a text is a story of the grammar with the same hero and of the same kind as the example."""
    hero = re.match(r"Once upon a time there was an? (\w+) named (\w+)\.", example)
    if hero is None:
        raise ValueError("the example is not a story")
    animal, name = hero.groups()
    others = "|".join(other for other in world.STORY_ANIMALS if other != animal)
    friendship = ""
    if " Then a " in example:
        friendship = (
            rf" Then a (?P<friend>{others}) came along\. The (?P=friend) was sad and alone\."
            rf" {name} gave the {{item}} to the (?P=friend)\. The (?P=friend) smiled and said thank you\."
            rf" From that day on {name} and the (?P=friend) were friends\."
        )
    places = "|".join(world.STORY_PLACES)
    for thing in world.STORY_THINGS:
        grammar = (
            rf"Once upon a time there was a {animal} named {name}\. {name} lived in ({places})\."
            rf" One day {name} found {thing}\.{friendship.format(item=thing.split()[-1])}"
            rf" {name} was very (happy|glad)\. The end\."
        )
        if re.fullmatch(grammar, text):
            return True
    return False


def evaluate_model(folder: Path, count: int) -> dict[str, Score]:
    """Ask `count` held-out questions of every task; return the scores by task."""
    network, tokenizer = load_demo_network(folder)
    scores: dict[str, Score] = {}
    for task in corpus.TASKS:
        samples = corpus.draw_held_out(task, count)
        right = 0
        for sample in samples:
            prompt, answer = prompt_and_answer(sample)
            if task == "story":
                text = generate_greedy(network, tokenizer, prompt)
                right += text.endswith(END_OF_TURN) and is_story(
                    text.removesuffix(END_OF_TURN), answer.removesuffix(END_OF_TURN)
                )
            else:
                right += _writes_answer(network, tokenizer, prompt, answer)
        scores[task] = Score(right, len(samples), len({sample.keys[-1] for sample in samples}))
    return scores


def accuracy_table(scores: dict[str, Score]) -> str:
    """Return the scores as a Markdown table; tasks below the required accuracy are marked."""
    lines = ["| Task | Accuracy | Questions | Different ones |", "|---|---:|---:|---:|"]
    for task, score in scores.items():
        mark = "" if score.accuracy >= REQUIRED_ACCURACY else " (below 90 %)"
        lines.append(f"| {task} | {100 * score.accuracy:.1f} %{mark} | {score.asked} | {score.keys} |")
    return "\n".join(lines)
