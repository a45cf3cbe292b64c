"""LangChain over OpenAI's API: images and sound, in either kind of parts. Arguments: HOST:PORT VISION SPEECH."""

import sys

from cases import TEXT, TOKENS, base64_text, check_answer, image_part
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

address, vision, speech = sys.argv[1:]


def check_model(model, name, part):
    chat = ChatOpenAI(
        base_url=f"http://{address}/v1", api_key="none", model=model, temperature=0, max_tokens=TOKENS, max_retries=0
    )
    messages = [HumanMessage([part, TEXT])]
    check_answer(name, chat.invoke(messages).content)
    check_answer(name, "".join(chunk.content for chunk in chat.stream(messages)))


check_model(vision, "chat", image_part("image"))
check_model(vision, "chat", {"type": "image", "base64": base64_text("image"), "mime_type": "image/jpeg"})
check_model(vision, "other", {"type": "image", "base64": base64_text("other_image"), "mime_type": "image/png"})
check_model(speech, "sound", {"type": "audio", "base64": base64_text("clip"), "mime_type": "audio/wav"})
print("good")
