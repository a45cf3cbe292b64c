"""Anthropic's tool runner with a driver of its computer toolset. Its server's model follows a script.

Arguments: those of every client, which it does not need.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from anthropic import Anthropic
from anthropic.tools.computer import BetaAbstractComputerToolset20260801

SOURCE = Path(os.environ["CLIENTS_SOURCE"])
done: list[tuple[str, object]] = []


class Screen(BetaAbstractComputerToolset20260801):
    def left_click(self, context, action) -> None:
        done.append(("left_click", action.coordinate))

    def wait(self, context, action) -> None:
        done.append(("wait", action.duration))


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_toolset(port: int) -> None:
    client = Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
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
    click, wait = tool_call("computer_left_click", coordinate=[3, 4]), tool_call("computer_wait", duration=1)
    script = json.dumps([["Waited", "It is done."], ["Clicked", wait], ["Click it", click]])
    server = subprocess.Popen(
        [os.environ["SERVER_PYTHON"], str(SOURCE / "scripted_server.py"), script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE.parent), str(SOURCE.parents[1])))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout
        check_toolset(int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    assert len(sys.argv) == 3
    main()
    print("good")
