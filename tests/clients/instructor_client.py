"""instructor: named calls, strict or not, answers by schema, several calls, streams. Arguments: HOST:PORT MODEL."""

import sys
from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

address, model = sys.argv[1:]
COMMON = {"model": model, "temperature": 0, "max_retries": 0, "max_tokens": 300}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PERSON = [{"role": "user", "content": "Give me JSON for a person: Anna, 31 years old, from Paris."}]
BOTH = [{"role": "user", "content": "What is the weather in Paris and London?"}]


class get_weather(BaseModel):  # its name is the tool's name
    """Get the weather in a city."""

    city: str


class get_time(BaseModel):
    """Get the local time in a city."""

    city: str


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    city: str = Field(max_length=20)


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Rated(BaseModel, extra="forbid"):
    """A schema that the model was not trained for: only the grammar enforces it."""

    stars: Literal[1, 2, 3]
    mood: Literal["good", "bad"]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 30}}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    for how in ({}, thinking):
        assert create(response_model=get_weather, messages=WEATHER, **COMMON, **how).city == "Paris"
    assert create(response_model=Rated, messages=WEATHER, **COMMON).stars in (1, 2, 3)

create = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create
for how in ({}, thinking):  # instructor also describes the schema in the prompt, which the model was not trained for
    assert create(response_model=Rated, messages=WEATHER, **COMMON, **how).mood in ("good", "bad")
    assert create(response_model=Person, messages=PERSON, **COMMON, **how).age >= 0

create = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS).chat.completions.create
calls = list(create(response_model=Iterable[get_weather | get_time], messages=BOTH, **COMMON))
assert calls == [get_weather(city="Paris"), get_weather(city="London")], calls

partial = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial
*_, last = partial(response_model=Place, messages=WEATHER, **COMMON)  # a tool name that the model does not know
assert last.city in ("Paris", "London")
print("good")
