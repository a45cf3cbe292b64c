"""OpenAI's Python client: media in chats and responses, transcripts. Arguments: HOST:PORT VISION SPEECH."""

import sys

import openai
from cases import (
    FILES,
    QUESTION,
    TEXT,
    TOKENS,
    base64_text,
    check_answer,
    data_url,
    image_part,
    question_about,
    read_file,
)

address, vision, speech = sys.argv[1:]


def ask(model, messages):
    """Returns a whole answer, after comparing it with the stream."""
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    return whole


def text_part(text):
    return {"type": "text", "text": text}


for base in ("/v1", "/openai/v1", "/vllm/v1"):
    client = openai.OpenAI(base_url=f"http://{address}{base}", api_key="none", max_retries=0)
    check_answer("chat", ask(vision, question_about(image_part("image"))))
    check_answer("other", ask(vision, question_about(image_part("other_image"))))
    two = [text_part("Is "), image_part("image"), text_part(" as "), image_part("other_image"), text_part("?")]
    check_answer("two", ask(vision, [{"role": "user", "content": two}]))
    sound = {"type": "input_audio", "input_audio": {"data": base64_text("clip"), "format": "wav"}}
    check_answer("sound", ask(speech, question_about(sound)))

    transcribe = client.audio.transcriptions.create
    options = {"model": speech, "language": "en", "extra_body": {"max_completion_tokens": TOKENS}}
    with open(FILES["clip"], "rb") as file:
        check_answer("transcript", transcribe(file=file, **options).text)
    clip = ("tone.wav", read_file("clip"))
    check_answer("transcript", transcribe(file=clip, response_format="text", **options).removesuffix("\n"))
    events = list(transcribe(file=clip, stream=True, **options))
    if base == "/vllm/v1":
        pieces = [event.choices[0]["delta"].get("content") or "" for event in events if event.choices]
    else:
        assert events[-1].type == "transcript.text.done"
        pieces = [event.delta for event in events[:-1]]
    check_answer("transcript", "".join(pieces))

    try:
        ask(vision, question_about({"type": "image_url", "image_url": {"url": "https://example.com/sun.jpg"}}))
    except openai.APIStatusError as error:
        assert error.status_code == 400 and "example.com" in str(error), error
    else:
        raise AssertionError("it was not refused")

for base in ("/v1", "/openai/v1"):
    client = openai.OpenAI(base_url=f"http://{address}{base}", api_key="none", max_retries=0)
    question = [{"type": "input_image", "image_url": data_url("image")}, {"type": "input_text", "text": QUESTION}]
    options = {"model": vision, "input": [{"role": "user", "content": question}]}
    options |= {"temperature": 0, "max_output_tokens": TOKENS}
    check_answer("chat", client.responses.create(**options).output_text)
    events = client.responses.create(**options, stream=True)
    check_answer("chat", "".join(event.delta for event in events if event.type == "response.output_text.delta"))

for base in ("/v1", "/vllm/v1"):
    client = openai.OpenAI(base_url=f"http://{address}{base}", api_key="none", max_retries=0)
    video = {"type": "video_url", "video_url": {"url": data_url("video")}}
    check_answer("video", ask(vision, question_about(video)))
client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
file = {"type": "file", "file": {"filename": "sun.jpg", "file_data": data_url("image")}}
check_answer("chat", ask(vision, [{"role": "user", "content": [file, TEXT]}]))
print("good")
