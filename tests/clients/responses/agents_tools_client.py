"""OpenAI's Agents SDK with the tools that OpenAI defines and clients run. Its server's model follows a script.

Arguments: those of every client, which it does not need.
"""

import asyncio
import os
import runpy
import sys

from agents import (
    Agent,
    ApplyPatchTool,
    LocalShellTool,
    OpenAIResponsesModel,
    Runner,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellResult,
    ShellTool,
    Tool,
    apply_diff,
    set_tracing_disabled,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from openai import AsyncOpenAI

SCRIPTED = runpy.run_path(os.environ["CLIENTS_SOURCE"] + "/scripted_model.py")
SHELL_OUTPUT, LOCAL_OUTPUT, PATCH_OUTPUT = "one two", "three four", "five six"
done: list[object] = []


def run_shell(request) -> ShellResult:
    done.append(request.data.action.commands)
    outcome = ShellCallOutcome(type="exit", exit_code=0)
    return ShellResult(output=[ShellCommandOutput(stdout=SHELL_OUTPUT, outcome=outcome)])


def run_local(request) -> str:
    done.append(request.data.action.command)
    return LOCAL_OUTPUT


class Editor:
    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        done.append((operation.path, apply_diff("", operation.diff or "", "create")))
        return ApplyPatchResult(status="completed", output=PATCH_OUTPUT)

    update_file = delete_file = create_file


TOOLS: list[tuple[Tool, str, dict[str, object], object, str]] = [  # tool, its name, arguments, what is done, output
    (ShellTool(executor=run_shell), "shell", {"commands": ["ls", "pwd"], "timeout_ms": 900}, ["ls", "pwd"],
     SHELL_OUTPUT),
    (LocalShellTool(executor=run_local), "local_shell", {"command": ["ls", "-a"]}, ["ls", "-a"], LOCAL_OUTPUT),
    (ApplyPatchTool(editor=Editor()), "apply_patch", {"type": "create_file", "path": "a.md", "diff": "+b\n+c"},
     ("a.md", "b\nc"), PATCH_OUTPUT),
]  # fmt: skip


def write_script() -> list[tuple[str, str]]:
    calls = [(f"Use {name}", SCRIPTED["tool_call"](name, **arguments)) for _, name, arguments, _, _ in TOOLS]
    answers = [(output, f"It printed {output}.") for *_, output in TOOLS]
    return [("Once more", "It is the same."), *answers, *calls]


async def check_tools(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIResponsesModel(model="scripted", openai_client=client)
    for tool, name, _, expected, output in TOOLS:
        agent = Agent(name="Assistant", model=model, tools=[tool])
        for options in ({}, {"auto_previous_response_id": True}):
            result = await Runner.run(agent, f"Use {name}", max_turns=3, **options)
            assert done == [expected] and result.final_output == f"It printed {output}.", (done, result)
            done.clear()
        streamed = Runner.run_streamed(agent, f"Use {name}", max_turns=3)
        async for _ in streamed.stream_events():
            pass
        assert done == [expected] and streamed.final_output == f"It printed {output}.", (done, streamed)
        done.clear()
        history = [*streamed.to_input_list(), {"role": "user", "content": "Once more"}]
        assert (await Runner.run(agent, history, max_turns=3)).final_output == "It is the same."


def main() -> None:
    set_tracing_disabled(True)
    with SCRIPTED["serve_script"](write_script()) as url:
        asyncio.run(check_tools(url))


if __name__ == "__main__":
    assert len(sys.argv) == 3
    main()
    print("good")
