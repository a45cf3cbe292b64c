"""Calls of functions and of custom tools as items of the output."""

from __future__ import annotations

from parley.dialects.openai.custom_tools import CustomInput
from parley.dialects.openai.responses.events import EventStream
from parley.dialects.openai.responses.open_item import Item, ItemStatus, OpenItem
from parley.dialects.openai.responses.tools import ResponsesTool


class CallItem(OpenItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, call_id: str, tool: ResponsesTool):
        super().__init__(unique_id, output_index, events)
        self.call_id, self.tool = call_id, tool
        self._arguments: list[str] = []
        self._template = events.delta_template("response.function_call_arguments.delta", **self._place)

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments."""
        if text:
            self._arguments.append(text)
            self._events.write_delta(self._template, text)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        arguments = "".join(self._arguments)
        item = {"id": self.id, "type": "function_call", "status": status, "arguments": arguments}
        return item | {"call_id": self.call_id, "name": self.tool.name} | self._namespace_member()

    def _namespace_member(self) -> Item:
        return {"namespace": self.tool.namespace} if self.tool.namespace else {}

    def _close_parts(self) -> None:
        arguments = "".join(self._arguments)
        event = "response.function_call_arguments.done"
        self._events.write(event, **self._place, arguments=arguments, name=self.tool.name)


class CustomCallItem(CallItem):
    """A call of a custom tool. Its text is a JSON string in the arguments, and is sent as it arrives."""

    prefix = "ctc"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, call_id: str, tool: ResponsesTool):
        super().__init__(unique_id, output_index, events, call_id, tool)
        self._input = CustomInput()
        self._template = events.delta_template("response.custom_tool_call_input.delta", **self._place)

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments."""
        self._write_input(self._input.add_arguments(text))

    def close(self, status: ItemStatus) -> Item:
        """Write the events that end the item, and return it."""
        self._write_input(self._input.finish())
        return super().close(status)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        item = {"id": self.id, "type": "custom_tool_call", "status": status, "call_id": self.call_id}
        return item | {"input": self._input.text, "name": self.tool.name} | self._namespace_member()

    def _write_input(self, text: str) -> None:
        if text:
            self._events.write_delta(self._template, text)

    def _close_parts(self) -> None:
        self._events.write("response.custom_tool_call_input.done", **self._place, input=self._input.text)
