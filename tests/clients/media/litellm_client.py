"""LiteLLM: images, video and sound with the providers that send them. Arguments: HOST:PORT VISION SPEECH."""

import sys

import litellm
from cases import FILES, TOKENS, base64_text, check_answer, data_url, image_part, question_about

address, vision, speech = sys.argv[1:]
url = f"http://{address}"
litellm.num_retries = 0


def check_chat(name, model, base, part):
    options = {"model": model, "api_base": base, "api_key": "none", "max_tokens": TOKENS, "temperature": 0}
    options["messages"] = question_about(part)
    check_answer(name, litellm.completion(**options).choices[0].message.content)
    chunks = litellm.completion(**options, stream=True)
    check_answer(name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))


IMAGE_CHATS = {
    f"hosted_vllm/{vision}": f"{url}/v1",
    f"openai/{vision}": f"{url}/v1",
    "huggingface/tgi": url,
    f"databricks/{vision}": f"{url}/serving-endpoints",
}
for model, base in IMAGE_CHATS.items():
    check_chat("chat", model, base, image_part("image"))
check_chat("video", f"hosted_vllm/{vision}", f"{url}/v1", {"type": "file", "file": {"file_data": data_url("video")}})
sound = {"type": "input_audio", "input_audio": {"data": base64_text("clip"), "format": "wav"}}
check_chat("sound", f"openai/{speech}", f"{url}/v1", sound)
with open(FILES["clip"], "rb") as file:
    answer = litellm.transcription(
        model=f"openai/{speech}",
        api_base=f"{url}/v1",
        api_key="none",
        file=file,
        language="en",
        extra_body={"max_completion_tokens": TOKENS},
    )
check_answer("transcript", answer.text)
print("good")
