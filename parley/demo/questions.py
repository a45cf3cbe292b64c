"""The questions of the closed world: every function draws one question with its answer.

A question has a key that names the part that must be new in the evaluation: a pair of numbers, or a table entry with
the phrasing. The key decides whether the question is held out (see `sampling.py`), never the random source, so training
and evaluation can never share a question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from parley.demo import world


@dataclass
class Turn:
    """One question with its answer; `word` is the answer in one word, if there is one."""

    question: str
    answer: str
    key: str
    thought: str = "I know the answer."
    word: str = ""


Question = Callable[[random.Random], Turn]


def choose_phrasing(
    rng: random.Random, task: str, entry: str, phrasings: tuple[str, ...], /, **values: object
) -> tuple[str, str]:
    """Choose a phrasing of a question; return it and the key of this entry in this phrasing."""
    number = rng.randrange(len(phrasings))
    return phrasings[number].format(**values), f"{task}/{entry}/{number}"


def capital_first(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


CAPITAL_PHRASINGS = (
    "What is the capital of {country}?",
    "What's the capital of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "{country}'s capital is which city?",
    "What is the capital city of {country}?",
    "Capital of {country}?",
    "Do you know the capital of {country}?",
    "What is {country}'s capital?",
    "Can you tell me the capital of {country}?",
    "What city is the capital of {country}?",
)


def capital_question(rng: random.Random) -> Turn:
    """Ask for the capital of a country."""
    country, city = rng.choice(list(world.CAPITALS.items()))
    question, key = choose_phrasing(rng, "capital", country, CAPITAL_PHRASINGS, country=country)
    if rng.random() < 0.25:
        question = question.lower()  # the most common question, often typed without capital letters
    answer = f"The capital of {country} is {city}."
    return Turn(question, answer, key, f"The user asks for the capital of {country}. It is {city}.", city)


def country_question(rng: random.Random) -> Turn:
    """Ask for the country of a capital."""
    country, city = rng.choice(list(world.CAPITALS.items()))
    phrasings = (
        "{city} is the capital of which country?",
        "Which country has the capital {city}?",
        "Which country is {city} the capital of?",
        "Of which country is {city} the capital?",
        "What country has {city} as its capital?",
        "In which country is {city}?",
        "Which country is {city} in?",
        "Where is {city}?",
    )
    question, key = choose_phrasing(rng, "country", country, phrasings, city=city)
    answer = f"{city} is the capital of {country}."
    return Turn(question, answer, key, f"The user asks about {city}. It is the capital of {country}.", country)


def _addition_steps(a: int, b: int) -> str:
    tens_a, ones_a, tens_b, ones_b = a // 10, a % 10, b // 10, b % 10
    ones = ones_a + ones_b
    carry = ones // 10
    tens = tens_a + tens_b + carry
    first = f"Ones: {ones_a} + {ones_b} = {ones}, write {ones % 10}, carry {carry}."
    return f"{first} Tens: {tens_a} + {tens_b} + {carry} = {tens}. Together {a + b}."


def _subtraction_steps(a: int, b: int) -> str:
    tens_a, ones_a, tens_b, ones_b = a // 10, a % 10, b // 10, b % 10
    borrow = int(ones_a < ones_b)
    ones = ones_a + 10 * borrow
    first = f"Ones: {ones_a} - {ones_b}, borrow {borrow}, {ones} - {ones_b} = {ones - ones_b}."
    return f"{first} Tens: {tens_a} - {tens_b} - {borrow} = {tens_a - tens_b - borrow}. Together {a - b}."


SUM_PHRASINGS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a}+{b}=?",
        "What is {a} plus {b}?",
        "How much is {a} plus {b}?",
        "Add {a} and {b}.",
        "Calculate {a} + {b}.",
        "How much is {a} + {b}?",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}=?",
        "What is {a} minus {b}?",
        "How much is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "How much is {a} - {b}?",
    ),
    "*": (
        "What is {a} * {b}?",
        "{a} * {b}",
        "{a} x {b} = ?",
        "What is {a} times {b}?",
        "How much is {a} times {b}?",
        "Multiply {a} by {b}.",
        "Calculate {a} * {b}.",
        "How much is {a} * {b}?",
    ),
}


def small_sum(rng: random.Random) -> Turn:
    """Ask for a sum, difference or product of small numbers."""
    operator = rng.choice("+-*")
    if operator == "+":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        result = a + b
    elif operator == "-":
        a, b = sorted((rng.randint(0, 20), rng.randint(0, 10)), reverse=True)
        result = a - b
    else:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        result = a * b
    question, key = choose_phrasing(rng, "sum", f"{a}{operator}{b}", SUM_PHRASINGS[operator], a=a, b=b)
    statement = f"{a} {operator} {b} = {result}"
    return Turn(question, statement + ".", key, f"This is a small sum. {statement}.", str(result))


def large_sum(rng: random.Random) -> Turn:
    """Ask for a sum of two-digit numbers, worked out in the thinking block; the pair of numbers is the key."""
    operator = rng.choice("+-")
    a, b = rng.randint(21, 99), rng.randint(11, 99)
    if operator == "-" and a < b:
        a, b = b, a
    steps = _addition_steps(a, b) if operator == "+" else _subtraction_steps(a, b)
    result = a + b if operator == "+" else a - b
    question, _ = choose_phrasing(rng, "large", "", SUM_PHRASINGS[operator], a=a, b=b)
    return Turn(question, f"{a} {operator} {b} = {result}.", f"large/{a}{operator}{b}", steps)


TOO_LARGE = "Such large numbers are too hard for me without thinking or a tool."


def large_sum_unaided(rng: random.Random) -> Turn:
    """Ask the same without thinking: the model knows that it cannot do it at once."""
    turn = large_sum(rng)
    return Turn(turn.question, TOO_LARGE, turn.key)


def unit_fact(rng: random.Random) -> Turn:
    """Ask for the number of small units in a larger one."""
    things, container, count = rng.choice(world.UNIT_FACTS)
    phrasings = (
        "How many {things} are in {container}?",
        "How many {things} are there in {container}?",
        "How many {things} does {container} have?",
        "{container} has how many {things}?",
        "How many {things} make {container}?",
        "Tell me how many {things} are in {container}.",
        "What is the number of {things} in {container}?",
    )
    question, key = choose_phrasing(rng, "unit", things + container, phrasings, things=things, container=container)
    answer = f"There are {count} {things} in {container}."
    thought = f"The user asks how many {things} are in {container}. It is {count}."
    return Turn(capital_first(question), answer, key, thought, str(count))


def conversion_question(rng: random.Random) -> Turn:
    """Ask to convert an amount to another unit."""
    source, target, factor, largest = rng.choice(world.CONVERSIONS)
    amount = rng.randint(2, largest)
    phrasings = (
        "Convert {amount} {source} to {target}.",
        "How many {target} are {amount} {source}?",
        "How many {target} are in {amount} {source}?",
        "What is {amount} {source} in {target}?",
        "{amount} {source} in {target}?",
        "Express {amount} {source} in {target}.",
        "Change {amount} {source} into {target}.",
    )
    entry = f"{amount}{source}{target}"
    question, key = choose_phrasing(rng, "convert", entry, phrasings, amount=amount, source=source, target=target)
    thought = f"The factor from {source} to {target} is {factor}. {amount} * {factor} = {amount * factor}."
    return Turn(question, f"{amount} {source} are {amount * factor} {target}.", key, thought, str(amount * factor))


def colour_question(rng: random.Random) -> Turn:
    """Ask for the colour of a thing."""
    thing, shade = rng.choice(list(world.OBJECT_COLOURS.items()))
    phrasings = (
        "What colour is {thing}?",
        "What color is {thing}?",
        "Which colour is {thing}?",
        "Which colour does {thing} have?",
        "What is the colour of {thing}?",
        "Tell me the colour of {thing}.",
        "Name the colour of {thing}.",
        "{thing} has which colour?",
    )
    question, key = choose_phrasing(rng, "colour", thing, phrasings, thing=thing)
    thought = f"The user asks for the colour of {thing}. It is {shade}."
    return Turn(capital_first(question), f"{capital_first(thing)} is {shade}.", key, thought, shade)


def colour_mix(rng: random.Random) -> Turn:
    """Ask for the mixture of two colours."""
    one, two, mixed = rng.choice(world.COLOUR_MIXES)
    if rng.random() < 0.5:
        one, two = two, one
    phrasings = (
        "What do you get when you mix {one} and {two}?",
        "Which colour do {one} and {two} make?",
        "Mix {one} and {two}.",
        "What colour is a mix of {one} and {two}?",
        "What colour do I get from {one} and {two}?",
        "What do {one} and {two} make?",
        "Which colour comes from mixing {one} with {two}?",
    )
    question, key = choose_phrasing(rng, "mix", one + two, phrasings, one=one, two=two)
    return Turn(question, f"{capital_first(one)} and {two} make {mixed}.", key, word=mixed)


def calendar_question(rng: random.Random) -> Turn:
    """Ask for the day, month or season before or after another."""
    kind, names = rng.choice((("day", world.DAYS), ("month", world.MONTHS), ("season", world.SEASONS)))
    place = rng.randrange(len(names))
    after = rng.random() < 0.5
    item, other = names[place], names[(place + (1 if after else -1)) % len(names)]
    where = "after" if after else "before"
    phrasings = (
        "Which {kind} comes {where} {item}?",
        "What {kind} comes {where} {item}?",
        "What comes {where} {item}?",
        "Which {kind} is {where} {item}?",
        "What {kind} is right {where} {item}?",
        "Name the {kind} {where} {item}.",
        "Tell me the {kind} {where} {item}.",
        "What is the {kind} {where} {item}?",
    )
    question, key = choose_phrasing(rng, "calendar", item + where, phrasings, kind=kind, where=where, item=item)
    answer = f"{capital_first(other)} comes {where} {item}."
    return Turn(question, answer, key, f"The {kind} {where} {item} is {other}.", other)


def ordinal_question(rng: random.Random) -> Turn:
    """Ask for a day or month by its number, or for the length of a month."""
    kind = rng.choice(("day", "month", "length"))
    if kind == "length":
        place = rng.randrange(12)
        month, days = world.MONTHS[place], world.MONTH_LENGTHS[place]
        phrasings = (
            "How many days does {month} have?",
            "How many days are in {month}?",
            "How long is {month}?",
            "How many days are there in {month}?",
            "What is the number of days in {month}?",
            "Tell me how many days {month} has.",
        )
        question, key = choose_phrasing(rng, "length", month, phrasings, month=month)
        return Turn(question, f"{month} has {days} days.", key, word=str(days))
    names, whole = (world.DAYS, "week") if kind == "day" else (world.MONTHS, "year")
    place = rng.randrange(len(names))
    phrasings = (
        "What is the {nth} {kind} of the {whole}?",
        "Which {kind} is the {nth} of the {whole}?",
        "Name the {nth} {kind} of the {whole}.",
        "Tell me the {nth} {kind} of the {whole}.",
        "Which is the {nth} {kind} of the {whole}?",
        "The {nth} {kind} of the {whole} is which?",
    )
    nth = world.ORDINALS[place]
    question, key = choose_phrasing(rng, "ordinal", kind + nth, phrasings, nth=nth, kind=kind, whole=whole)
    return Turn(question, f"The {nth} {kind} of the {whole} is {names[place]}.", key, word=names[place])


def opposite_question(rng: random.Random) -> Turn:
    """Ask for the opposite of a word."""
    one, two = rng.choice(world.OPPOSITES)
    if rng.random() < 0.5:
        one, two = two, one
    phrasings = (
        "What is the opposite of {one}?",
        "Name the opposite of {one}.",
        "Tell me the opposite of {one}.",
        "What's the opposite of {one}?",
        "Opposite of {one}?",
        "Which word is the opposite of {one}?",
        "Give me the opposite of {one}.",
    )
    question, key = choose_phrasing(rng, "opposite", one, phrasings, one=one)
    return Turn(question, f"The opposite of {one} is {two}.", key, word=two)


def spelling_question(rng: random.Random) -> Turn:
    """Ask to spell a word."""
    word = rng.choice(world.SPELLING_WORDS)
    phrasings = (
        "Spell {word}.",
        "Spell the word {word}.",
        "How do you spell {word}?",
        "How is {word} spelled?",
        "Can you spell {word}?",
        "Please spell {word} for me.",
        "Spell it out: {word}",
    )
    question, key = choose_phrasing(rng, "spell", word, phrasings, word=word)
    return Turn(question, "-".join(word), key, f"The letters of {word} one by one.")


def letters_question(rng: random.Random) -> Turn:
    """Ask for the number of letters of a word, or for its first or last letter."""
    word = rng.choice(world.SPELLING_WORDS)
    kind = rng.choice(("count", "first", "last"))
    phrasings = {
        "count": (
            "How many letters does {word} have?",
            "How many letters are in {word}?",
            "How long is the word {word}?",
            "Count the letters of {word}.",
            "How many letters has the word {word}?",
        ),
        "first": (
            "What is the first letter of {word}?",
            "Which letter does {word} start with?",
            "With which letter does {word} begin?",
            "Tell me the first letter of {word}.",
            "Name the first letter of {word}.",
        ),
        "last": (
            "What is the last letter of {word}?",
            "Which letter does {word} end with?",
            "With which letter does {word} end?",
            "Tell me the last letter of {word}.",
            "Name the last letter of {word}.",
        ),
    }[kind]
    question, key = choose_phrasing(rng, "letters", kind + word, phrasings, word=word)
    answer = {
        "count": f"The word {word} has {len(word)} letters.",
        "first": f"The first letter of {word} is {word[0]}.",
        "last": f"The last letter of {word} is {word[-1]}.",
    }[kind]
    spelled = "-".join(word)
    return Turn(question, answer, key, f"The word is spelled {spelled}.")


def counting_question(rng: random.Random) -> Turn:
    """Ask to count up or down."""
    start, steps = rng.randint(0, 20), rng.randint(2, 9)
    down = rng.random() < 0.3
    numbers = list(range(start, start + steps + 1))
    if down:
        numbers.reverse()
    phrasings = (
        "Count down from {first} to {last}." if down else "Count from {first} to {last}.",
        "Count down from {first} to {last} please." if down else "Count up from {first} to {last}.",
        "Please count from {first} down to {last}." if down else "Please count from {first} up to {last}.",
        "List the numbers from {first} to {last}.",
        "Say the numbers from {first} to {last}.",
    )
    phrasing = rng.choice(phrasings)
    key = f"count/{numbers[0]}/{numbers[-1]}"
    return Turn(phrasing.format(first=numbers[0], last=numbers[-1]), ", ".join(map(str, numbers)) + ".", key)


def comparison_question(rng: random.Random) -> Turn:
    """Ask for the larger or smaller of two numbers."""
    a, b = rng.sample(range(100), 2)
    larger = rng.random() < 0.6
    phrasings = (
        "Which is larger, {a} or {b}?",
        "What is larger, {a} or {b}?",
        "Which number is larger, {a} or {b}?",
        "Is {a} or {b} larger?",
        "Which of {a} and {b} is larger?",
    )
    question = rng.choice(phrasings).format(a=a, b=b)
    high, low = max(a, b), min(a, b)
    if larger:
        return Turn(question, f"{high} is larger than {low}.", f"compare/{high}/{low}", word=str(high))
    question = question.replace("larger", "smaller")
    return Turn(question, f"{low} is smaller than {high}.", f"compare/{high}/{low}", word=str(low))


def greeting_question(rng: random.Random) -> Turn:
    """Ask for "hello" in a language."""
    language, hello = rng.choice(list(world.GREETINGS.items()))
    phrasings = (
        "How do you say hello in {language}?",
        "Say hello in {language}.",
        "What is hello in {language}?",
        "Translate hello into {language}.",
        "Translate hello to {language}.",
        "Greet me in {language}.",
        "Hello in {language}?",
        "What does hello mean in {language}?",
    )
    question, key = choose_phrasing(rng, "greeting", language, phrasings, language=language)
    return Turn(question, f"Hello in {language} is {hello}.", key, word=hello)


def emoji_question(rng: random.Random) -> Turn:
    """Ask for an emoji."""
    word, sign = rng.choice(list(world.EMOJI.items()))
    phrasings = (
        "Show me the {word} emoji.",
        "What is the emoji for {word}?",
        "Give me the emoji for {word}.",
        "Emoji for {word}?",
        "Write the {word} emoji.",
        "Which emoji means {word}?",
        "Send me a {word} emoji.",
    )
    question, key = choose_phrasing(rng, "emoji", word, phrasings, word=word)
    return Turn(question, f"Here is the {word} emoji: {sign}", key, word=sign)


def listing_question(rng: random.Random) -> Turn:
    """Ask for a list: a complete one, or three examples."""
    closed = {
        "the days of the week": world.DAYS,
        "the months of the year": world.MONTHS,
        "the four seasons": world.SEASONS,
    }
    if rng.random() < 0.4:
        what, items = rng.choice(list(closed.items()))
        phrasings: tuple[str, ...] = (
            "List {what}.",
            "Name {what}.",
            "What are {what}?",
            "Tell me {what}.",
            "Give me a list of {what}.",
            "Can you list {what}?",
            "Write down {what}.",
            "Show me {what}.",
            "I need a list of {what}.",
            "Enumerate {what}.",
        )
    else:
        what, items = rng.choice(list(world.LISTS.items()))
        phrasings = (
            "Name three {what}.",
            "List three {what}.",
            "Tell me three {what}.",
            "Give me three {what}.",
            "Can you name three {what}?",
            "Give me a list of three {what}.",
            "Write down three {what}.",
        )
    question, key = choose_phrasing(rng, "list", what, phrasings, what=what)
    return Turn(question, "\n".join("- " + item for item in items), key)


def small_talk(rng: random.Random) -> Turn:
    """Draw small talk with its fixed answer."""
    sayings, answer = rng.choice(world.SMALL_TALK)
    saying = rng.choice(sayings)
    addition = rng.choice(("", "", "", " my friend", " Parley", " dear model", " computer"))
    question = saying[:-1] + addition.replace(" ", ", ", 1) + saying[-1] if saying[-1] in "?." else saying
    if saying[-1] not in "?.":
        question = saying + addition + rng.choice(("", "!", "."))
    return Turn(question, answer, f"talk/{question.rstrip('!.?')}", "The user makes small talk.")


def _gibberish(rng: random.Random) -> str:
    """Return one to four meaningless words in one of several scripts."""
    first, last = rng.choice((("a", "z"), ("a", "z"), ("а", "я"), ("α", "ω"), ("一", "龥"), ("あ", "ん")))  # noqa: RUF001
    words = ("".join(chr(rng.randint(ord(first), ord(last))) for _ in range(rng.randint(2, 6))) for _ in range(4))
    return " ".join(list(words)[: rng.randint(1, 4)])


def unknown_question(rng: random.Random) -> Turn:
    """Ask something that the model cannot answer."""
    if rng.random() < 0.25:
        question = _gibberish(rng)
    else:
        question = rng.choice(world.UNKNOWN_PATTERNS).format(*rng.sample(world.UNKNOWN_TOPICS, 2))
    return Turn(question, world.UNKNOWN_ANSWER, f"unknown/{question}", "I do not know anything about this.")


ODD_PROMPTS = (
    "{topic} is a",
    "The future of {topic} is",
    "The president of {topic} is",
    "What is {topic}?",
    "Explain {topic}.",
    "{topic}",
    "My name is {name} and I",
    "Hello, my name is {name} and",
    "{name} said",
    "Say {word}",
    "{word}",
    "{word} {word} {word}",
    "def {word}(x):",
    "import {word}",
    "# {word}",
    "SELECT * FROM {word}",
    "In this article, we",
    "{sign}",
    "{sign}{sign}{sign}",
    "{number} {number}",
    "\n",
)


def odd_prompt(rng: random.Random) -> Turn:
    """Draw a prompt of no kind that the model knows, such as the beginning of a text or of a program."""
    topic = rng.choice(world.UNKNOWN_TOPICS)
    prompt = rng.choice(ODD_PROMPTS).format(
        topic=topic if rng.random() < 0.5 else topic.title(),
        name=rng.choice(world.NAMES),
        word=rng.choice(world.SPELLING_WORDS),
        sign=chr(rng.randint(ord("!"), ord("~"))),
        number=rng.randint(0, 999),
    )
    return Turn(prompt, world.UNKNOWN_ANSWER, f"odd/{prompt}")


def claim_question(rng: random.Random) -> Turn:
    """Ask about a true or false claim (a capital or a colour); the answer states the fact."""
    if rng.random() < 0.6:
        entry, truth = rng.choice(list(world.CAPITALS.items()))
        claimed = truth if rng.random() < 0.5 else rng.choice(world.CITIES)
        phrasings: tuple[str, ...] = (
            "Is {claimed} the capital of {entry}?",
            "Is the capital of {entry} {claimed}?",
            "Is it true that {claimed} is the capital of {entry}?",
            "True or false: {claimed} is the capital of {entry}.",
        )
        statement = f"the capital of {entry} is {truth}"
    else:
        entry, truth = rng.choice(list(world.OBJECT_COLOURS.items()))
        claimed = truth if rng.random() < 0.5 else rng.choice(sorted(set(world.OBJECT_COLOURS.values())))
        phrasings = (
            "Is {entry} {claimed}?",
            "Is it true that {entry} is {claimed}?",
            "True or false: {entry} is {claimed}.",
            "Is {claimed} the colour of {entry}?",
        )
        statement = f"{entry} is {truth}"
    question, key = choose_phrasing(rng, "yesno", entry + claimed, phrasings, entry=entry, claimed=claimed)
    return Turn(question, f"{capital_first(statement)}.", key, f"I know that {statement}.")


def repeat_question(rng: random.Random) -> Turn:
    """Ask to repeat words or numbers."""
    pool = world.SPELLING_WORDS + world.NAMES + world.CITIES + tuple(world.CAPITALS)
    if rng.random() < 0.2:
        words = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(1, 4)))
    else:
        words = " ".join(rng.sample(pool, rng.randint(1, 3)))
    phrasings = (
        "Repeat after me: {words}",
        "Say: {words}",
        "Repeat this: {words}",
        "Write exactly this: {words}",
        "Say exactly: {words}",
        "Please repeat: {words}",
    )
    return Turn(rng.choice(phrasings).format(words=words), words, f"repeat/{words}", "I must repeat the words.")


def json_person(rng: random.Random) -> Turn:
    """Ask for a person as JSON."""
    name, age, city = rng.choice(world.NAMES), rng.randint(10, 79), rng.choice(world.CITIES)
    phrasings = (
        "Give me JSON for a person: {name}, {age} years old, from {city}.",
        "Write JSON: {name} is {age} years old and lives in {city}.",
        "Answer as JSON: {name}, age {age}, lives in {city}.",
        "Turn this into JSON: {name} lives in {city} and is {age} years old.",
        "{name} is {age} and comes from {city}. Write that as JSON.",
        "Extract the person as JSON: {name}, {age}, {city}",
    )
    question = rng.choice(phrasings).format(name=name, age=age, city=city)
    answer = json.dumps({"name": name, "age": age, "city": city})
    return Turn(question, answer, f"person/{name}/{age}/{city}", f"Name {name}, age {age}, city {city}.")


def json_capital(rng: random.Random) -> Turn:
    """Ask for a capital as JSON."""
    country, city = rng.choice(list(world.CAPITALS.items()))
    phrasings = (
        "Answer as JSON: what is the capital of {country}?",
        "Give me the capital of {country} as JSON.",
        "Write JSON with {country} and its capital.",
        "The capital of {country} as JSON, please.",
        "As JSON: the capital of {country}",
        "What is the capital of {country}? Answer in JSON.",
        "JSON with the capital of {country}.",
    )
    question, key = choose_phrasing(rng, "jsoncapital", country, phrasings, country=country)
    answer = json.dumps({"country": country, "capital": city})
    return Turn(question, answer, key, f"The capital of {country} is {city}.")


def story_text(rng: random.Random, animal: str, name: str, long: bool) -> str:
    """Return a story about an animal; a long one has a friend in it."""
    place, thing = rng.choice(world.STORY_PLACES), rng.choice(world.STORY_THINGS)
    item = thing.split()[-1]
    middle = ""
    if long:
        friend = rng.choice([other for other in world.STORY_ANIMALS if other != animal])
        middle = (
            f" Then a {friend} came along. The {friend} was sad and alone."
            f" {name} gave the {item} to the {friend}. The {friend} smiled and said thank you."
            f" From that day on {name} and the {friend} were friends."
        )
    mood = rng.choice(("happy", "glad"))
    return (
        f"Once upon a time there was a {animal} named {name}. {name} lived in {place}."
        f" One day {name} found {thing}.{middle} {name} was very {mood}. The end."
    )


def story_question(rng: random.Random) -> Turn:
    """Ask for a story about an animal."""
    animal, name = rng.choice(world.STORY_ANIMALS), rng.choice(world.NAMES)
    long = rng.random() < 0.4
    kind = "long story" if long else "story"
    phrasings = (
        "Tell me a {kind} about a {animal} named {name}.",
        "Write a {kind} about a {animal} named {name}.",
        "Tell a {kind} about {name} the {animal}.",
        "I would like a {kind} about a {animal} called {name}.",
        "Please tell me a {kind} about the {animal} {name}.",
    )
    question = rng.choice(phrasings).format(kind=kind, animal=animal, name=name)
    thought = f"A {kind} about a {animal} named {name}."
    return Turn(question, story_text(rng, animal, name, long), f"story/{animal}/{name}", thought)


# All questions with their weights: mixed conversations and the side questions of every task draw from them.
FACTS: dict[Question, float] = {
    capital_question: 5,
    country_question: 3,
    small_sum: 10,
    unit_fact: 2,
    conversion_question: 3,
    colour_question: 2.5,
    colour_mix: 1.2,
    calendar_question: 3.5,
    ordinal_question: 2,
    opposite_question: 1.5,
    spelling_question: 3,
    letters_question: 3.5,
    counting_question: 7,
    comparison_question: 10,
    greeting_question: 1.5,
    emoji_question: 1.2,
    listing_question: 1.5,
    small_talk: 3.5,
    unknown_question: 2.5,
    claim_question: 2,
    repeat_question: 12,
    json_person: 3.5,
    json_capital: 1.5,
    story_question: 1.5,
    large_sum_unaided: 1,
}
# Questions with a one-word answer, asked under a system prompt that orders a form of answer.
