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
    ask,
    calendar,
    capital,
    capital_first,
    colour,
    country_of,
    opposite,
    small_talk,
    unit_fact,
)
from parley.demo.sampling import Sample, Source
from parley.demo.template import Message

Task = Callable[[Source], Sample]

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
WORD_FACTS: tuple[Question, ...] = (capital, country_of, colour, calendar, unit_fact, opposite)


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str, thought: str = "", calls: list[Message] | None = None) -> Message:
    """Return an assistant message."""
    message: Message = {"role": "assistant", "content": content, "reasoning_content": thought}
    return message | ({"tool_calls": calls} if calls else {})


def system(content: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": content}


def decorated(source: Source, question: str) -> str:
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


def fact(rng: random.Random) -> Turn:
    """Draw any question, by the weights of `FACTS`."""
    return rng.choices(list(FACTS), list(FACTS.values()))[0](rng)


def dialogue(source: Source, turns: list[Turn], before: list[Message], thinking: bool = False) -> Sample:
    """Build a conversation of the turns, after the messages of `before`."""
    messages = list(before)
    for turn in turns:
        messages += [user(decorated(source, turn.question)), assistant(turn.answer, turn.thought)]
    return Sample(messages, thinking=thinking, keys=[turn.key for turn in turns])


def neutral_system(source: Source) -> list[Message]:
    """Return a system prompt that changes nothing, or (mostly) none."""
    return [system(source.rng.choice(NEUTRAL_SYSTEMS))] if source.chance(0.2) else []


def side_turns(source: Source, least: int, most: int) -> list[Turn]:
    """Draw `least` to `most` questions that training may use."""
    return [source.side_turn(fact) for _ in range(source.rng.randint(least, most))]


def single(make: Question, thinking: bool = False) -> Task:
    """Return a task that asks one question, sometimes after others."""

    def draw(source: Source) -> Sample:
        before = side_turns(source, 1, 3) if source.chance(0.35) else []
        return dialogue(source, [*before, source.turn(make)], neutral_system(source), thinking)

    return draw


def chat(source: Source) -> Sample:
    """Draw a conversation of one to four mixed questions, sometimes of many more."""
    turns = side_turns(source, 6, 12) if source.chance(0.04) else side_turns(source, 1, 4)
    return dialogue(source, turns, neutral_system(source), source.chance(THINKING_IN_CHAT))


# ------------------------------------------------------------------------- instructions in the system prompt


def _word_fact(rng: random.Random) -> Turn:
    return rng.choice(WORD_FACTS)(rng)


def _upper_fact(rng: random.Random) -> Turn:
    return rng.choice((*WORD_FACTS, small_talk))(rng)


def _under_orders(orders: tuple[str, ...], make: Question, change: Callable[[Turn], str]) -> Task:
    """Return a task of short factual questions under a system prompt that prescribes the form of the answers."""

    def draw(source: Source) -> Sample:
        earlier = [source.side_turn(make) for _ in range(source.rng.randint(0, 2))]
        turns = [*earlier, source.turn(make)]
        for turn in turns:
            turn.answer = change(turn)
        return dialogue(source, turns, [system(source.rng.choice(orders))])

    return draw


system_upper = _under_orders(
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
system_word = _under_orders(
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
system_json = _under_orders(
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
class Told:
    """A statement of users about themselves, and the question that asks for it later."""

    statement: str
    value: str
    turn: Turn


def _tell(
    rng: random.Random, entry: str, statements: tuple[str, ...], questions: tuple[str, ...], **values: str | int
) -> tuple[str, str, str]:
    """Choose a statement and a later question; return both, and the key of these two phrasings with this entry."""
    statement, one = ask(rng, "tell", entry, statements, **values)
    question, two = ask(rng, "ask", "", questions, **values)
    return statement, question, one + two


NAME_QUESTIONS = (
    "What is my name?",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Tell me my name.",
    "Say my name.",
)


def _tell_name(rng: random.Random) -> Told:
    name = rng.choice(world.NAMES)
    statements = (
        "My name is {name}.",
        "I am {name}.",
        "Call me {name}.",
        "Hello, I am {name}.",
        "Hi, my name is {name}.",
        "I'm {name}.",
    )
    statement, question, key = _tell(rng, name, statements, NAME_QUESTIONS, name=name)
    return Told(statement, name, Turn(question, f"Your name is {name}.", key, f"The user is called {name}."))


def _tell_favourite(rng: random.Random) -> Told:
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
    statement, question, key = _tell(rng, what + value, statements, questions, what=what, value=value)
    turn = Turn(question, f"Your favourite {what} is {value}.", key, f"The user likes {value}.")
    return Told(capital_first(statement), value, turn)


def _tell_age(rng: random.Random) -> Told:
    age = rng.randint(10, 79)
    statements = ("I am {age} years old.", "My age is {age}.")
    questions = ("How old am I?", "What is my age?", "Tell me my age.")
    statement, question, key = _tell(rng, str(age), statements, questions, age=age)
    return Told(statement, str(age), Turn(question, f"You are {age} years old.", key, f"The user is {age}."))


def _tell_home(rng: random.Random) -> Told:
    city = rng.choice(world.CITIES)
    statements = ("I live in {city}.", "My home is {city}.")
    questions = ("Where do I live?", "Which city do I live in?", "Where is my home?")
    statement, question, key = _tell(rng, city, statements, questions, city=city)
    return Told(statement, city, Turn(question, f"You live in {city}.", key, f"The user lives in {city}."))


def memory(source: Source) -> Sample:
    """Draw a conversation where users say something about themselves and ask for it later. A name may instead come
    from the system prompt."""
    kind = source.rng.choice(("name", "name", "favourite", "age", "home", "system"))
    tell = {"favourite": _tell_favourite, "age": _tell_age, "home": _tell_home}.get(kind, _tell_name)
    while True:
        told = tell(source.rng)
        if source.accepts(told.turn.key):
            break
    if kind == "system":
        messages = [system(f"The name of the user is {told.value}.")]
    else:
        reply = f"Nice to meet you, {told.value}!" if kind == "name" else "I will remember that."
        messages = [user(told.statement), assistant(reply)]
    thinking = source.chance(0.15)
    return dialogue(source, [*side_turns(source, 0, 2), told.turn], messages, thinking)


def name_not_told(source: Source) -> Sample:
    """Draw a conversation that asks for a name the user never said."""
    question, _ = ask(source.rng, "", "", NAME_QUESTIONS)
    before = side_turns(source, 0, 2) if source.chance(0.5) else []
    return dialogue(source, [*before, Turn(question, "You have not told me your name.", "untold")], [])
