"""The training text of the built-in model: a seeded, endless stream of samples, and the held-out questions.

`TASKS` lists everything that the model learns and is evaluated on. `draw_training` never uses a held-out question in
any turn; `draw_held_out` always uses one in the last turn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from parley.demo import questions, world
from parley.demo.dialogues import (
    Task,
    decorate_question,
    draw_fact,
    memory_sample,
    mixed_chat,
    name_not_told,
    single_question,
    system_json,
    system_upper,
    system_word,
)
from parley.demo.errands import (
    tool_call,
    tool_call_thinking,
    tool_missing,
    tool_not_needed,
    tool_parallel,
    tool_result,
)
from parley.demo.questions import capital_first, story_text
from parley.demo.sampling import Sample, SampleSource, is_held_out
from parley.demo.template import END_OF_TEXT

ODD_SHARE = 0.15  # of the plain questions
KEY_REPEATS = 5  # evaluation samples that may use the same held-out question


def _draw_sentence(rng: random.Random) -> tuple[str, str, str]:
    """Draw a sentence of plain text: (given part, rest, key)."""
    country, city = rng.choice(list(world.CAPITALS.items()))
    thing, shade = rng.choice(list(world.OBJECT_COLOURS.items()))
    things, container, count = rng.choice(world.UNIT_FACTS)
    place = rng.randrange(7)
    today, tomorrow = world.DAYS[place], world.DAYS[(place + 1) % 7]
    forms = (
        (f"The capital of {country} is", f" {city}."),
        (f"{city} is the capital of", f" {country}."),
        (f"{country} is a country. Its capital is", f" {city}."),
        (f"{capital_first(thing)} is", f" {shade}."),
        (f"The colour of {thing} is", f" {shade}."),
        (f"The number of {things} in {container} is", f" {count}."),
        (f"There are {count} {things} in", f" {container}."),
        (f"The day after {today} is", f" {tomorrow}."),
        (f"{today} comes before", f" {tomorrow}."),
    )
    beginning, ending = rng.choices(forms, (6, 3, 2, 2, 2, 1, 0.5, 1, 1))[0]
    return beginning, ending, f"plain/{beginning}"


def plain_text(source: SampleSource) -> Sample:
    """Draw sentences about the world, or a story; for the evaluation one unfinished sentence."""
    rng = source.rng
    if source.held_out:
        while True:
            beginning, ending, key = _draw_sentence(rng)
            if source.accepts_key(key) and not beginning.startswith(
                "There are"
            ):  # several containers hold the same number
                return Sample(text=beginning + ending, prompt=len(beginning), keys=[key])
    if source.happens_with(0.2):
        animal, name = rng.choice(world.STORY_ANIMALS), rng.choice(world.NAMES)
        return Sample(text=story_text(rng, animal, name, source.happens_with(0.5)) + END_OF_TEXT)
    parts: list[str] = []
    keys: list[str] = []
    while len(parts) < 6 and (not parts or source.happens_with(0.4)):  # so mostly one sentence
        beginning, ending, key = _draw_sentence(rng)
        if source.accepts_key(key):
            parts.append(beginning + ending)
            keys.append(key)
    return Sample(text=" ".join(parts) + END_OF_TEXT, keys=keys)


def plain_question(source: SampleSource) -> Sample:
    """Draw a question without a chat template, or an odd prompt, and its answer. Then the text ends."""
    if source.happens_with(ODD_SHARE):
        turn = source.draw_turn(questions.odd_prompt)
        return Sample(text=f"{turn.question} {turn.answer}{END_OF_TEXT}", prompt=len(turn.question), keys=[turn.key])
    while (turn := source.draw_turn(draw_fact)).key.startswith("story/") and source.held_out:
        pass  # a story has many correct texts
    question = decorate_question(source, turn.question)
    prompt, gap = source.rng.choices(
        ((question, " "), (question + "\n", ""), (f"Question: {question}\nAnswer:", " ")), (8, 1, 1)
    )[0]
    return Sample(text=prompt + gap + turn.answer + END_OF_TEXT, prompt=len(prompt), keys=[turn.key])


# name -> (task, share of the samples). Questions without a share of their own are learnt from `mixed_chat`.
TASKS: dict[str, tuple[Task, float]] = {
    "capital": (single_question(questions.capital_question), 0.5),
    "country of a capital": (single_question(questions.country_question), 0),
    "small sums": (single_question(questions.small_sum), 1),
    "unit facts": (single_question(questions.unit_fact), 0),
    "unit conversion": (single_question(questions.conversion_question), 0),
    "colours": (single_question(questions.colour_question), 0),
    "mixed colours": (single_question(questions.colour_mix), 0),
    "before and after": (single_question(questions.calendar_question), 0),
    "ordinals and months": (single_question(questions.ordinal_question), 0),
    "opposites": (single_question(questions.opposite_question), 0),
    "spelling": (single_question(questions.spelling_question), 0),
    "letters": (single_question(questions.letters_question), 0),
    "counting": (single_question(questions.counting_question), 0),
    "comparing numbers": (single_question(questions.comparison_question), 3),
    "hello in a language": (single_question(questions.greeting_question), 0),
    "emoji": (single_question(questions.emoji_question), 0),
    "lists": (single_question(questions.listing_question), 0),
    "small talk": (single_question(questions.small_talk), 1),
    "out of its world": (single_question(questions.unknown_question), 0),
    "claims": (single_question(questions.claim_question), 0),
    "repeating": (single_question(questions.repeat_question), 4),
    "JSON person": (single_question(questions.json_person), 0.5),
    "JSON capital": (single_question(questions.json_capital), 0),
    "story": (single_question(questions.story_question), 0),
    "sums too large": (single_question(questions.large_sum_unaided), 0),
    "system: upper case": (system_upper, 9),
    "system: one word": (system_word, 3),
    "system: JSON": (system_json, 2),
    "memory": (memory_sample, 18),
    "tool call": (tool_call, 3),
    "two tool calls": (tool_parallel, 3),
    "tool result": (tool_result, 3),
    "tool not needed": (tool_not_needed, 6),
    "tool missing": (tool_missing, 3),
    "thinking: tool call": (tool_call_thinking, 2),
    "thinking: capital": (single_question(questions.capital_question, thinking=True), 1.5),
    "thinking: units": (single_question(questions.conversion_question, thinking=True), 7),
    "thinking: large sums": (single_question(questions.large_sum, thinking=True), 20),
    "plain text": (plain_text, 10),
    "plain question": (plain_question, 80),
}
# Samples for training only: a mixture of all questions, and one question that is always the same.
UNEVALUATED: tuple[tuple[Task, float], ...] = ((mixed_chat, 36), (name_not_told, 1))


def draw_training(seed: int) -> Iterator[Sample]:
    """Yield training samples without end; the same seed gives the same stream."""
    rng = random.Random(seed)
    source = SampleSource(rng, held_out=False)
    mixture = [*UNEVALUATED, *TASKS.values()]
    tasks, shares = [task for task, _ in mixture], [share for _, share in mixture]
    while True:
        yield rng.choices(tasks, shares)[0](source)


def draw_held_out(task: str, count: int, seed: int = 1) -> list[Sample]:
    """Draw different samples of a task whose last question has a held-out key.

    A small table has few such keys, so a key may be used up to `KEY_REPEATS` times, with different surroundings.
    """
    source = SampleSource(random.Random(f"{task}/{seed}"), held_out=True)
    samples: dict[str, Sample] = {}
    uses: Counter[str] = Counter()
    for _ in range(50 * count):
        sample = TASKS[task][0](source)
        text, key = sample.text or repr(sample.messages), sample.keys[-1]
        if text not in samples and uses[key] < KEY_REPEATS:
            samples[text] = sample
            uses[key] += 1
        if len(samples) == count:
            break
    return list(samples.values())


__all__ = ["TASKS", "Sample", "draw_held_out", "draw_training", "is_held_out"]
