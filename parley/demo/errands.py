"""Conversations with tools: requests that need one, tool results, two calls at once, and tools that are not needed.

The tools are fixed: each has the same name and parameters everywhere. The list of tools varies, and the same request
occurs with and without its tool, so that the model has to read the list.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from parley.demo import world
from parley.demo.dialogues import (
    assistant_message,
    build_dialogue,
    decorate_question,
    draw_fact,
    draw_neutral_system,
    user_message,
)
from parley.demo.questions import TOO_LARGE, Turn, choose_phrasing
from parley.demo.sampling import Sample, SampleSource
from parley.demo.template import DemoMessage


def _define_tool(name: str, description: str, /, **parameters: tuple[str, str]) -> DemoMessage:
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: dict[str, DemoMessage] = {
    "get_weather": _define_tool("get_weather", "Get the weather in a city.", city=("string", "The city")),
    "get_time": _define_tool("get_time", "Get the local time in a city.", city=("string", "The city")),
    "add": _define_tool("add", "Add two numbers.", a=("integer", "First number"), b=("integer", "Second number")),
    "set_timer": _define_tool("set_timer", "Start a timer.", minutes=("integer", "Minutes to wait")),
    "find_person": _define_tool("find_person", "Look up a person.", name=("string", "Name of the person")),
}
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


@dataclass
class Errand:
    """A request that needs a tool, with the call, the tool's result and the answer made from it."""

    request: str
    key: str
    tool: str
    arguments: dict[str, str | int]
    result: dict[str, str | int | bool]
    answer: str
    clause: str  # the request as a part of a longer sentence
    refusal: str  # the answer when the tool is not listed

    @property
    def call_member(self) -> DemoMessage:
        """Return the call of the tool."""
        return {"name": self.tool, "arguments": self.arguments}

    @property
    def result_message(self) -> DemoMessage:
        """Return the message with the tool's result."""
        return {"role": "tool", "content": json.dumps(self.result)}


def _weather_errand(rng: random.Random) -> Errand:
    city, sky, degrees = rng.choice(world.CITIES), rng.choice(SKIES), rng.randint(1, 35)
    phrasings = (
        "What is the weather in {city}?",
        "How is the weather in {city}?",
        "What's the weather like in {city}?",
        "Tell me the weather in {city}.",
        "Weather in {city}?",
        "Check the weather in {city}.",
        "Is it raining in {city}?",
        "How warm is it in {city}?",
    )
    request, key = choose_phrasing(rng, "get_weather", city, phrasings, city=city)
    return Errand(
        request,
        key,
        "get_weather",
        {"city": city},
        {"city": city, "sky": sky, "temperature": degrees},
        f"It is {sky} and {degrees} degrees in {city}.",
        f"the weather in {city}",
        "I have no tool to look up the weather.",
    )


def _time_errand(rng: random.Random) -> Errand:
    city, clock = rng.choice(world.CITIES), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    phrasings = (
        "What time is it in {city}?",
        "What is the time in {city}?",
        "Tell me the time in {city}.",
        "Time in {city}?",
        "Which time is it in {city}?",
        "How late is it in {city}?",
        "What is the local time in {city}?",
        "Check the time in {city}.",
    )
    request, key = choose_phrasing(rng, "get_time", city, phrasings, city=city)
    return Errand(
        request,
        key,
        "get_time",
        {"city": city},
        {"city": city, "time": clock},
        f"It is {clock} in {city}.",
        f"the time in {city}",
        "I have no tool to look up the time.",
    )


def _addition_errand(rng: random.Random) -> Errand:
    least, most = rng.choice(((21, 99), (100, 999)))
    a, b = rng.randint(least, most), rng.randint(least, most)
    phrasings = (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "How much is {a} plus {b}?",
        "Calculate {a} + {b}.",
        "What is {a} plus {b}?",
        "{a} + {b}",
    )
    request, _ = choose_phrasing(rng, "add", "", phrasings, a=a, b=b)
    return Errand(
        request,
        f"large/{a}+{b}",  # the key of the same sum asked without a tool
        "add",
        {"a": a, "b": b},
        {"sum": a + b},
        f"The sum is {a + b}.",
        f"{a} + {b}",
        TOO_LARGE,
    )


def _timer_errand(rng: random.Random) -> Errand:
    minutes = rng.randint(1, 60)
    phrasings = (
        "Set a timer for {minutes} minutes.",
        "Start a timer of {minutes} minutes.",
        "Timer for {minutes} minutes.",
        "Please set a {minutes} minute timer.",
        "Wake me in {minutes} minutes.",
        "I need a timer for {minutes} minutes.",
    )
    request, key = choose_phrasing(rng, "set_timer", str(minutes), phrasings, minutes=minutes)
    return Errand(
        request,
        key,
        "set_timer",
        {"minutes": minutes},
        {"ok": True, "minutes": minutes},
        f"The timer is set for {minutes} minutes.",
        f"a timer for {minutes} minutes",
        "I have no tool to set a timer.",
    )


def _person_errand(rng: random.Random) -> Errand:
    name, city, age = rng.choice(world.NAMES), rng.choice(world.CITIES), rng.randint(10, 79)
    phrasings = (
        "Who is {name}?",
        "Find {name}.",
        "Look up {name}.",
        "Find the person {name}.",
        "Search for {name}.",
        "What do you know about {name}?",
        "Tell me who {name} is.",
    )
    request, key = choose_phrasing(rng, "find_person", name, phrasings, name=name)
    return Errand(
        request,
        key,
        "find_person",
        {"name": name},
        {"name": name, "age": age, "city": city},
        f"{name} is {age} years old and lives in {city}.",
        f"the person {name}",
        "I have no tool to look up people.",
    )


ERRANDS: dict[str, Callable[[random.Random], Errand]] = {
    "get_weather": _weather_errand,
    "get_time": _time_errand,
    "add": _addition_errand,
    "set_timer": _timer_errand,
    "find_person": _person_errand,
}


def _draw_errand(source: SampleSource) -> Errand:
    """Draw an errand on this source's side of the split."""
    while True:
        errand = ERRANDS[source.rng.choice(list(TOOLS))](source.rng)
        if source.accepts_key(errand.key):
            return errand


def _without_descriptions(tool: DemoMessage) -> DemoMessage:
    function = tool["function"]
    properties = {key: {"type": value["type"]} for key, value in function["parameters"]["properties"].items()}
    parameters = function["parameters"] | {"properties": properties}
    return {"type": "function", "function": function | {"parameters": parameters}}


def _list_tools(source: SampleSource, needed: tuple[str, ...], missing: bool = False) -> list[DemoMessage]:
    """List one to four tools in any order: the needed ones and some others, or (`missing`) only others."""
    rng = source.rng
    others = [name for name in TOOLS if name not in needed]
    names = rng.sample(others, rng.choice((0, 0, 0, 1, 1, 2, 3)) if not missing else rng.randint(1, 3))
    names += [] if missing else needed
    rng.shuffle(names)
    undescribed = source.happens_with(0.3)  # parameters do not always have descriptions
    return [_without_descriptions(TOOLS[name]) if undescribed else TOOLS[name] for name in names]


def _calling_message(*errands: Errand) -> DemoMessage:
    thought = "I should call " + " and ".join(errand.tool for errand in errands) + "."
    return assistant_message("", thought, [errand.call_member for errand in errands])


def _toolless_fact(rng: random.Random) -> Turn:
    """Draw a question that needs no tool, whichever tools are listed."""
    while True:
        turn = draw_fact(rng)
        if turn.answer != TOO_LARGE:
            return turn


def _call_sample(source: SampleSource, thinking: bool) -> Sample:
    errand = _draw_errand(source)
    tools = _list_tools(source, (errand.tool,))
    before = [source.draw_side_turn(_toolless_fact)] if source.happens_with(0.15) else []
    sample = build_dialogue(source, before, draw_neutral_system(source), thinking)
    sample.messages += [user_message(decorate_question(source, errand.request)), _calling_message(errand)]
    sample.tools = tools
    sample.keys.append(errand.key)
    return sample


def tool_call(source: SampleSource) -> Sample:
    """Draw a request and the call of its tool."""
    return _call_sample(source, thinking=False)


def tool_call_thinking(source: SampleSource) -> Sample:
    """Draw a request, a thought and the call of its tool."""
    return _call_sample(source, thinking=True)


def _draw_errand_pair(source: SampleSource) -> tuple[Errand, Errand, str, str]:
    """Draw two errands, one request for both, and the request's key."""
    rng = source.rng
    while True:
        kinds = rng.choices(("get_weather", "get_time", "find_person", "set_timer"), k=2)
        first, second = (ERRANDS[kind](rng) for kind in kinds)
        if first.call_member == second.call_member:
            continue
        phrasings: tuple[str, ...] = (
            "I need {one} and {two}.",
            "Give me {one} and {two}.",
            "Get me {one} and also {two}.",
            "Please get {one} and {two}.",
            "Two things: {one} and {two}.",
        )
        one, two = first.clause, second.clause
        request, key = choose_phrasing(rng, "two", f"{one}/{two}", phrasings, one=one, two=two)
        if kinds[0] == kinds[1] and kinds[0] in ("get_weather", "get_time") and source.happens_with(0.6):
            what = kinds[0].removeprefix("get_")
            phrasings = (
                "What is the {what} in {one} and {two}?",
                "What is the {what} in {one} and in {two}?",
                "Tell me the {what} in {one} and {two}.",
                "Compare the {what} in {one} and {two}.",
            )
            one, two = str(first.arguments["city"]), str(second.arguments["city"])
            request, key = choose_phrasing(rng, "two" + what, f"{one}/{two}", phrasings, what=what, one=one, two=two)
        if source.accepts_key(key):
            return first, second, request, key


def tool_parallel(source: SampleSource) -> Sample:
    """Draw a request that needs two calls at once; in training sometimes with both results."""
    first, second, request, key = _draw_errand_pair(source)
    tools = _list_tools(source, tuple(dict.fromkeys((first.tool, second.tool))))
    messages = [
        *draw_neutral_system(source),
        user_message(decorate_question(source, request)),
        _calling_message(first, second),
    ]
    if not source.held_out and source.happens_with(0.3):
        messages += [first.result_message, second.result_message]
        messages.append(assistant_message(f"{first.answer} {second.answer}", "I have both results."))
    return Sample(messages, tools, source.happens_with(0.15), keys=[key])


def tool_result(source: SampleSource) -> Sample:
    """Draw a request, its call, the result, and the answer made from it."""
    errand = _draw_errand(source)
    messages = [
        *draw_neutral_system(source),
        user_message(decorate_question(source, errand.request)),
        _calling_message(errand),
        errand.result_message,
        assistant_message(errand.answer, "I have the result."),
    ]
    tools = _list_tools(source, (errand.tool,))
    return Sample(messages, tools, source.happens_with(0.2), keys=[errand.key])


def tool_not_needed(source: SampleSource) -> Sample:
    """Draw a question that needs no tool although tools are listed."""
    sample = build_dialogue(
        source, [source.draw_turn(_toolless_fact)], draw_neutral_system(source), source.happens_with(0.1)
    )
    sample.tools = _list_tools(source, ()) or [TOOLS["get_weather"]]
    return sample


def tool_missing(source: SampleSource) -> Sample:
    """Draw a request whose tool is not listed."""
    errand = _draw_errand(source)
    tools = _list_tools(source, (errand.tool,), missing=True) if source.happens_with(0.6) else None
    # With thinking, the model can do some large sums.
    thinking = errand.refusal != TOO_LARGE and source.happens_with(0.1)
    messages = [
        *draw_neutral_system(source),
        user_message(decorate_question(source, errand.request)),
        assistant_message(errand.refusal, "There is no tool for this."),
    ]
    return Sample(messages, tools, thinking, keys=[errand.key])
