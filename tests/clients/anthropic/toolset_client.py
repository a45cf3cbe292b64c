"""Anthropic's tool runner with a driver of its computer toolset. Its server's model follows a script.

Arguments: those of every client, which it does not need.
"""

import os
import runpy
import sys

from anthropic import Anthropic
from anthropic.tools.computer import BetaAbstractComputerToolset20260801

SCRIPTED = runpy.run_path(os.environ["CLIENTS_SOURCE"] + "/scripted_model.py")
done: list[tuple[str, object]] = []


class Screen(BetaAbstractComputerToolset20260801):
    def left_click(self, context, action) -> None:
        done.append(("left_click", action.coordinate))

    def wait(self, context, action) -> None:
        done.append(("wait", action.duration))


def check_toolset(url: str) -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    for streams in (False, True):
        runner = client.beta.messages.tool_runner(
            model="scripted",
            max_tokens=200,
            messages=[{"role": "user", "content": "Click it"}],
            tools=[Screen()],
            stream=streams,
        )
        messages = [step.get_final_message() if streams else step for step in runner]
        assert done == [("left_click", [3, 4]), ("wait", 1)], done
        assert messages[0].content[0].toolset_name == "computer", messages
        assert messages[-1].content[0].text == "It is done.", messages
        done.clear()


def main() -> None:
    tool_call = SCRIPTED["tool_call"]
    click, wait = tool_call("computer_left_click", coordinate=[3, 4]), tool_call("computer_wait", duration=1)
    script = [("Waited", "It is done."), ("Clicked", wait), ("Click it", click)]
    with SCRIPTED["serve_script"](script) as url:
        check_toolset(url)


if __name__ == "__main__":
    assert len(sys.argv) == 3
    main()
    print("good")
