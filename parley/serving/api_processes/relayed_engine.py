"""The engine in an API process: it sends its requests to the main process, which has the real engine.

The main process decides whether the real engine serves: it refuses admission, or sends an error output to a request
that comes too late. So this engine takes every request.
"""

from __future__ import annotations

from collections.abc import Callable

from parley.engine.messages import CancelRequest, FinishBeamSearch, StepOutputs, SubmitRequest, ToEngine
from parley.engine.output_stream import OutputStream, StreamGroup
from parley.engine.protocol import Engine
from parley.errors import NotReady
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineOutput, EngineRequest, EngineSettings, EngineStats, ModelInfo

RelayedMessage = SubmitRequest | CancelRequest | FinishBeamSearch


class RelayedEngine(Engine):
    """``send_engine_message`` sends a message for the engine. ``id_prefix`` makes the ids of requests different from
    those of other processes, also where clients choose them."""

    def __init__(self, info: ModelInfo, id_prefix: str, send_engine_message: Callable[[RelayedMessage], None]):
        super().__init__()
        self._model_info, self._id_prefix, self._send_engine_message = info, id_prefix, send_engine_message

    async def start(self) -> None:
        """Become ready at once, because the main process has loaded the model."""
        self._begin_loading()
        self._become_ready(self._model_info)

    async def close(self) -> None:
        """End all streams with an error."""
        self.state = "closed"
        self._release_waiters("The server is shutting down.")

    def submit_request(self, request: EngineRequest, group: StreamGroup | None = None) -> OutputStream:
        """Submit a request under an id of this process. Raises ValueError for an id in use."""
        request.id = self._id_prefix + request.id
        self.state = "ready"  # the request was admitted
        return super().submit_request(request, group)

    async def load_adapter(self, name: str, folder: str) -> str:
        """Return no error: the real engine has the adapter."""
        return ""

    def deliver_outputs(self, outputs: list[EngineOutput], stats: EngineStats, *, is_ready: bool) -> None:
        """Deliver outputs that the main process relays. ``is_ready``: the real engine serves."""
        self.state = "ready" if is_ready else "restarting"
        self._deliver_outputs(StepOutputs(outputs, stats))

    def _send_to_engine(self, message: ToEngine) -> None:
        assert isinstance(message, RelayedMessage), "the main process asks the engine all else"
        self._send_engine_message(message)


class RelayedModel(ServedModel):
    """A model whose engine, slots and state the main process has."""

    def __init__(self, names: tuple[str, ...], settings: EngineSettings, engine: RelayedEngine, options: ServerOptions):
        super().__init__(names, settings, engine, options)
        self.relayed_engine = engine
        engine.step_observers.clear()  # the main process records steps

    def unready_error(self) -> NotReady | None:
        """Return None: the main process refuses requests that cannot be accepted."""
        return None
