"""LlamaIndex's OpenAILike: blocks with images and sound. Arguments: HOST:PORT VISION SPEECH."""

import sys

from cases import FILES, QUESTION, TOKENS, check_answer
from llama_index.core.llms import AudioBlock, ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike

address, vision, speech = sys.argv[1:]


def check_model(model, name, block):
    chat = OpenAILike(
        model=model,
        api_base=f"http://{address}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=TOKENS,
        max_retries=0,
        context_window=2048,
    )
    messages = [ChatMessage(role="user", blocks=[block, TextBlock(text=QUESTION)])]
    check_answer(name, chat.chat(messages).message.content)
    check_answer(name, "".join(part.delta or "" for part in chat.stream_chat(messages)))


check_model(vision, "chat", ImageBlock(path=FILES["image"]))
check_model(vision, "other", ImageBlock(path=FILES["other_image"]))
check_model(speech, "sound", AudioBlock(path=FILES["clip"], format="wav"))
print("good")
