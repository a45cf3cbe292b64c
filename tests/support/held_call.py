"""A method whose calls a test holds back, to let something else happen first."""

import threading
from typing import Any

import pytest

SECONDS = 10  # that a test waits at most


class HeldCall:
    """A method of ``owner`` whose calls, in threads, begin with waiting for ``release``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str):
        self.has_begun, self.release, self.has_ended = (threading.Event() for _ in range(3))
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            self.has_begun.set()
            assert self.release.wait(SECONDS)
            result = method(*arguments)
            self.has_ended.set()
            return result

        monkeypatch.setattr(owner, name, call)

    def end_before(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """Let the held call, once it has begun, end just before the next call of another method, which it may use."""
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if self.has_begun.is_set() and not self.release.is_set():
                self.release.set()
                assert self.has_ended.wait(SECONDS)
            return method(*arguments)

        monkeypatch.setattr(owner, name, call)
