"""TGI's own Python client (text-generation): Markdown links, whole and streamed. Arguments: HOST:PORT VISION SPEECH."""

import sys

from cases import QUESTION, TOKENS, check_answer, data_url
from text_generation import Client
from text_generation.errors import ValidationError

address, vision, speech = sys.argv[1:]
PROMPT = f"![]({data_url('image')}){QUESTION}"

for base in ("", "/tgi"):
    client = Client(f"http://{address}{base}")
    whole = client.generate(PROMPT, max_new_tokens=TOKENS)
    check_answer("text", whole.generated_text)
    events = list(client.generate_stream(PROMPT, max_new_tokens=TOKENS))
    check_answer("text", events[-1].generated_text)
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    # Its chats are left out: their messages hold texts only.
    try:
        client.generate("![](data:image/png;base64,AAAA) What is it?", max_new_tokens=TOKENS)
    except ValidationError as error:
        assert "invalid image" in str(error), error
    else:
        raise AssertionError("it was not refused")
print("good")
