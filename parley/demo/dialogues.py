"""Conversations without tools: single and mixed questions, instructions in the system prompt, and memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from parley.demo import world
from parley.demo.questions import (
    FACTS,
    Question,
    Turn,
    calendar_question,
    capital_first,
    capital_question,
    choose_phrasing,
    colour_question,
    country_question,
    opposite_question,
    small_talk,
    unit_fact,
)
from parley.demo.sampling import Sample, SampleSource
from parley.demo.template import DemoMessage

Task = Callable[[SampleSource], Sample]

THINKING_IN_CHAT = 0.12

NEUTRAL_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Parley.",
    "You are a friendly assistant.",
    "Be helpful.",
    "You are a helpful AI assistant. Answer the questions of the user.",
    "Answer briefly.",
    "You are a small model.",
    "Be kind and honest.",
)
POLITE_BEFORE = ("Please tell me: ", "Hi! ", "Hello. ", "Hey, ", "Quick question: ", "Now tell me: ", "OK. ", "Next: ")
POLITE_AFTER = (" Thanks!", " Thank you.", " Please.")

# Questions with a one-word answer, asked under a system prompt that prescribes the form of the answer.
WORD_FACTS: tuple[Question, ...] = (
    capital_question,
    country_question,
    colour_question,
    calendar_question,
    unit_fact,
    opposite_question,
)


def user_message(content: str) -> DemoMessage:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant_message(content: str, thought: str = "", calls: list[DemoMessage] | None = None) -> DemoMessage:
    """Return an assistant message."""
    message: DemoMessage = {"role": "assistant", "content": content, "reasoning_content": thought}
    return message | ({"tool_calls": calls} if calls else {})


def system_message(content: str) -> DemoMessage:
    """Return a system message."""
    return {"role": "system", "content": content}


def decorate_question(source: SampleSource, question: str) -> str:
    """Vary a question as people type it: mostly unchanged, sometimes polite, in lower case or without its mark."""
    draw = source.rng.random()
    if draw < 0.75:
        return question
    if draw < 0.83:
        return source.rng.choice(POLITE_BEFORE) + question
    if draw < 0.88:
        return question + source.rng.choice(POLITE_AFTER)
    if draw < 0.94:
        return question.rstrip("?.")
    return question[0].lower() + question[1:]


def draw_fact(rng: random.Random) -> Turn:
    """Draw any question, by the weights of `FACTS`."""
    return rng.choices(list(FACTS), list(FACTS.values()))[0](rng)


def build_dialogue(
    source: SampleSource, turns: list[Turn], before: list[DemoMessage], thinking: bool = False
) -> Sample:
    """Build a conversation of the turns, after the messages of `before`."""
    messages = list(before)
    for turn in turns:
        messages += [
            user_message(decorate_question(source, turn.question)),
            assistant_message(turn.answer, turn.thought),
        ]
    return Sample(messages, thinking=thinking, keys=[turn.key for turn in turns])


def draw_neutral_system(source: SampleSource) -> list[DemoMessage]:
    """Return a system prompt that changes nothing, or (mostly) none."""
    return [system_message(source.rng.choice(NEUTRAL_SYSTEMS))] if source.happens_with(0.2) else []


def draw_side_turns(source: SampleSource, least: int, most: int) -> list[Turn]:
    """Draw `least` to `most` questions that training may use."""
    return [source.draw_side_turn(draw_fact) for _ in range(source.rng.randint(least, most))]


def single_question(make: Question, thinking: bool = False) -> Task:
    """Return a task that asks one question, sometimes after others."""

    def draw_single(source: SampleSource) -> Sample:
        before = draw_side_turns(source, 1, 3) if source.happens_with(0.35) else []
        return build_dialogue(source, [*before, source.draw_turn(make)], draw_neutral_system(source), thinking)

    return draw_single


def mixed_chat(source: SampleSource) -> Sample:
    """Draw a conversation of one to four mixed questions, sometimes of many more."""
    turns = draw_side_turns(source, 6, 12) if source.happens_with(0.04) else draw_side_turns(source, 1, 4)
    return build_dialogue(source, turns, draw_neutral_system(source), source.happens_with(THINKING_IN_CHAT))


# ------------------------------------------------------------------------- instructions in the system prompt


def _word_fact(rng: random.Random) -> Turn:
    return rng.choice(WORD_FACTS)(rng)


def _upper_fact(rng: random.Random) -> Turn:
    return rng.choice((*WORD_FACTS, small_talk))(rng)


def _instructed_task(orders: tuple[str, ...], make: Question, change: Callable[[Turn], str]) -> Task:
    """Return a task of short factual questions under a system prompt that prescribes the form of the answers."""

    def draw_instructed(source: SampleSource) -> Sample:
        earlier = [source.draw_side_turn(make) for _ in range(source.rng.randint(0, 2))]
        turns = [*earlier, source.draw_turn(make)]
        for turn in turns:
            turn.answer = change(turn)
        return build_dialogue(source, turns, [system_message(source.rng.choice(orders))])

    return draw_instructed


system_upper = _instructed_task(
    (
        "Answer in upper case.",
        "Always answer in upper case.",
        "Answer in capital letters.",
        "Answer in UPPER CASE.",
        "You always write in upper case.",
    ),
    _upper_fact,
    lambda turn: turn.answer.upper(),
)
system_word = _instructed_task(
    (
        "Answer in one word.",
        "Answer with one word.",
        "Always answer in one word.",
        "Give one word answers.",
        "Answer with a single word.",
    ),
    _word_fact,
    lambda turn: turn.word,
)
system_json = _instructed_task(
    (
        "Answer in JSON.",
        "Answer as JSON.",
        "Always answer in JSON.",
        "Reply with JSON only.",
        "Give your answers as JSON.",
    ),
    _word_fact,
    lambda turn: json.dumps({"answer": turn.word}, ensure_ascii=False),
)

# -------------------------------------------------------------------------------------------------- memory


@dataclass
class UserStatement:
    """A statement of users about themselves, and the question that asks for it later."""

    statement: str
    value: str
    turn: Turn


def _choose_statement(
    rng: random.Random, entry: str, statements: tuple[str, ...], questions: tuple[str, ...], **values: str | int
) -> tuple[str, str, str]:
    """Choose a statement and a later question; return both, and the key of these two phrasings with this entry."""
    statement, one = choose_phrasing(rng, "tell", entry, statements, **values)
    question, two = choose_phrasing(rng, "ask", "", questions, **values)
    return statement, question, one + two


NAME_QUESTIONS = (
    "What is my name?",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Tell me my name.",
    "Say my name.",
)


def _state_name(rng: random.Random) -> UserStatement:
    name = rng.choice(world.NAMES)
    statements = (
        "My name is {name}.",
        "I am {name}.",
        "Call me {name}.",
        "Hello, I am {name}.",
        "Hi, my name is {name}.",
        "I'm {name}.",
    )
    statement, question, key = _choose_statement(rng, name, statements, NAME_QUESTIONS, name=name)
    return UserStatement(statement, name, Turn(question, f"Your name is {name}.", key, f"The user is called {name}."))


def _state_favourite(rng: random.Random) -> UserStatement:
    what = rng.choice(list(world.FAVOURITES))
    value = rng.choice(world.FAVOURITES[what])
    statements = (
        "My favourite {what} is {value}.",
        "I like {value}, it is my favourite {what}.",
        "{value} is my favourite {what}.",
    )
    questions = (
        "What is my favourite {what}?",
        "Which {what} is my favourite?",
        "Do you remember my favourite {what}?",
        "Tell me my favourite {what}.",
    )
    statement, question, key = _choose_statement(rng, what + value, statements, questions, what=what, value=value)
    turn = Turn(question, f"Your favourite {what} is {value}.", key, f"The user likes {value}.")
    return UserStatement(capital_first(statement), value, turn)


def _state_age(rng: random.Random) -> UserStatement:
    age = rng.randint(10, 79)
    statements = ("I am {age} years old.", "My age is {age}.")
    questions = ("How old am I?", "What is my age?", "Tell me my age.")
    statement, question, key = _choose_statement(rng, str(age), statements, questions, age=age)
    return UserStatement(statement, str(age), Turn(question, f"You are {age} years old.", key, f"The user is {age}."))


def _state_home(rng: random.Random) -> UserStatement:
    city = rng.choice(world.CITIES)
    statements = ("I live in {city}.", "My home is {city}.")
    questions = ("Where do I live?", "Which city do I live in?", "Where is my home?")
    statement, question, key = _choose_statement(rng, city, statements, questions, city=city)
    return UserStatement(statement, city, Turn(question, f"You live in {city}.", key, f"The user lives in {city}."))


def memory_sample(source: SampleSource) -> Sample:
    """Draw a conversation where users say something about themselves and ask for it later. A name may instead come
    from the system prompt."""
    kind = source.rng.choice(("name", "name", "favourite", "age", "home", "system"))
    draw_statement = {"favourite": _state_favourite, "age": _state_age, "home": _state_home}.get(kind, _state_name)
    while True:
        stated = draw_statement(source.rng)
        if source.accepts_key(stated.turn.key):
            break
    if kind == "system":
        messages = [system_message(f"The name of the user is {stated.value}.")]
    else:
        reply = f"Nice to meet you, {stated.value}!" if kind == "name" else "I will remember that."
        messages = [user_message(stated.statement), assistant_message(reply)]
    thinking = source.happens_with(0.15)
    return build_dialogue(source, [*draw_side_turns(source, 0, 2), stated.turn], messages, thinking)


def name_not_told(source: SampleSource) -> Sample:
    """Draw a conversation that asks for a name the user never said."""
    question, _ = choose_phrasing(source.rng, "", "", NAME_QUESTIONS)
    before = draw_side_turns(source, 0, 2) if source.happens_with(0.5) else []
    return build_dialogue(source, [*before, Turn(question, "You have not told me your name.", "untold")], [])
