"""Anthropic's tool runner with drivers of its toolsets. Their server's model follows a script.

Arguments: those of every client, which it does not need.
"""

import os
import runpy
import sys

from anthropic import Anthropic
from anthropic.tools.browser import (
    BetaAbstractBrowserToolset20260801,
    BetaBrowserNavigateResult,
    BetaBrowserState,
)
from anthropic.tools.computer import BetaAbstractComputerToolset20260801

SCRIPTED = runpy.run_path(os.environ["CLIENTS_SOURCE"] + "/scripted_model.py")
done: list[tuple[str, object]] = []


class Screen(BetaAbstractComputerToolset20260801):
    def left_click(self, context, action) -> None:
        done.append(("left_click", action.coordinate))

    def wait(self, context, action) -> None:
        done.append(("wait", action.duration))


class Browser(BetaAbstractBrowserToolset20260801):
    def _browser_state(self, context) -> BetaBrowserState:
        return BetaBrowserState(tabs=[{"tab_id": "7", "title": "Harbour", "url": "http://a/", "active": True}])

    def navigate(self, context, action) -> BetaBrowserNavigateResult:
        done.append(("navigate", action.url))
        return BetaBrowserNavigateResult(url="http://a/", title="Harbour")

    def left_click(self, context, action) -> None:
        done.append(("left_click", action.target.ref))


def check_toolset(url: str, toolset: object, question: str, expected: list[tuple[str, object]]) -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    for streams in (False, True):
        runner = client.beta.messages.tool_runner(
            model="scripted",
            max_tokens=200,
            messages=[{"role": "user", "content": question}],
            tools=[toolset],
            stream=streams,
        )
        messages = [step.get_final_message() if streams else step for step in runner]
        assert done == expected, done
        assert messages[0].content[0].toolset_name == toolset.toolset_name, messages
        assert messages[-1].content[0].text == "It is done.", messages
        done.clear()


def main() -> None:
    tool_call, serve_script = SCRIPTED["tool_call"], SCRIPTED["serve_script"]
    click, wait = tool_call("computer_left_click", coordinate=[3, 4]), tool_call("computer_wait", duration=1)
    with serve_script([("Waited", "It is done."), ("Clicked", wait), ("Click it", click)]) as url:
        check_toolset(url, Screen(), "Click it", [("left_click", [3, 4]), ("wait", 1)])
    visit = tool_call("browser_navigate", url="http://a/")
    choose = tool_call("browser_left_click", target={"type": "ref", "ref": "ref_2"})
    with serve_script([("Clicked", "It is done."), ("7 (active): Harbour", choose), ("Open it", visit)]) as url:
        check_toolset(url, Browser(), "Open it", [("navigate", "http://a/"), ("left_click", "ref_2")])


if __name__ == "__main__":
    assert len(sys.argv) == 3
    main()
    print("good")
