"""``parley pull``: downloads a model from the hub, with one bar over all of its files."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from parley.settings.option_kinds import text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions

USAGE = """\
usage: parley pull MODEL

Downloads a model from the Hugging Face hub into the Hugging Face cache, where `parley serve` finds it. MODEL is
owner/name, owner/name@REVISION, and for GGUF files owner/name:QUANT or owner/name/FILE.gguf."""

OPTIONS = [Option("model", text_kind("MODEL"), "Name of the model on the hub.", positional=True)]
BAR_LENGTH = 24
BAR_SECONDS, LINE_SECONDS = 0.1, 10.0  # between two states in a terminal, and elsewhere


class ProgressLine:
    """Shows a progress: a bar in a terminal, elsewhere a line every ten seconds."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._draws = stream.isatty()
        self._shown = time.monotonic() - (LINE_SECONDS if self._draws else 0.0)

    def show(self, stage: str, fraction: float) -> None:
        """Show the progress, unless it was shown a moment ago."""
        now = time.monotonic()
        if now - self._shown < (BAR_SECONDS if self._draws else LINE_SECONDS) and fraction < 1:
            return
        self._shown = now
        if self._draws:
            length = round(BAR_LENGTH * fraction)
            self._stream.write(f"\r\x1b[K  {'█' * length}{'·' * (BAR_LENGTH - length)} {fraction:4.0%} {stage}")
        else:
            self._stream.write(f"{stage}, {fraction:.0%}\n")
        self._stream.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self._draws:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def run_command(config: ResolvedOptions) -> int:
    """Download the model. Return 1 if that fails."""
    from parley import hub

    if config["model"] is None:
        raise ConfigError("Name a model, such as Qwen/Qwen2.5-0.5B-Instruct.")
    progress = ProgressLine(sys.stderr)
    try:
        folder = hub.pull_model(config["model"], progress.show)
    except hub.ModelMissing as error:
        progress.close()
        print(f"parley: {str(error).replace('cannot be served', 'cannot be pulled', 1)}", file=sys.stderr)
        return 1
    progress.close()
    print(f"{config['model']} is in {folder}\nServe it: parley serve {config['model']}")
    return 0
