"""Claude's Agent SDK: a query and a conversation, each of which reads a file. Its server's model follows a script.

Arguments: those of every client, which it does not need.
"""

import asyncio
import os
import runpy
import sys
import tempfile
from pathlib import Path

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, StreamEvent, query

NOTE = "The harbour opens at seven."
ANSWER = "The file was read, and it ends here."
SCRIPTED = runpy.run_path(os.environ["CLIENTS_SOURCE"] + "/scripted_model.py")


async def check_agent(options: ClaudeAgentOptions) -> None:
    messages = [message async for message in query(prompt="Read note.txt", options=options)]
    last = messages[-1]
    assert isinstance(last, ResultMessage) and last.result == ANSWER and not last.is_error, last
    assert last.num_turns == 2 and last.usage and last.usage["output_tokens"] > 0, last
    assert any(isinstance(message, StreamEvent) for message in messages)
    async with ClaudeSDKClient(options) as client:
        for _ in range(2):
            await client.query("Read note.txt")
            messages = [message async for message in client.receive_response()]
            assert isinstance(messages[-1], ResultMessage) and messages[-1].result == ANSWER, messages


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "note.txt"
        file.write_text(f"{NOTE}\n")
        script = [(NOTE, ANSWER), ("", SCRIPTED["tool_call"]("Read", file_path=str(file)))]
        with SCRIPTED["serve_script"](script) as url:
            environment = {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "HOME": folder,
            }
            options = ClaudeAgentOptions(
                model="scripted",
                allowed_tools=["Read"],
                cwd=folder,
                env=environment,
                include_partial_messages=True,
                max_turns=4,
            )
            asyncio.run(check_agent(options))


if __name__ == "__main__":
    assert len(sys.argv) == 3
    main()
    print("good")
