"""``parley watermark``: detects the watermark that a request can ask for. Needs a tokenizer but no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parley import hub
from parley.settings.option_kinds import switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions
from parley.watermark import GREEN_FRACTION, Z_THRESHOLD, WatermarkResult, detect_watermark

USAGE = f"""\
usage: parley watermark [MODEL] [--file FILE]

Detects whether a text was generated with a watermark by the model, or by another one with the same tokenizer: whether
more of its tokens are green than by chance. Reads standard input without --file.
Exit code 0 if it is marked (z at least {Z_THRESHOLD:g}), 1 if not."""

OPTIONS = [
    Option(
        "model", text_kind("MODEL"), "Model whose tokenizer to use.", unset_text="the built-in model", positional=True
    ),
    Option("file", text_kind("FILE"), "The text, in UTF-8.", unset_text="standard input"),
    Option("json", switch_kind(), "Print JSON.", False),
]


def run_command(config: ResolvedOptions) -> int:
    """Read the text, print whether it is marked, and return the exit code. Raises ConfigError."""
    from parley.text.tokens.json_files import BadTokenizer
    from parley.text.tokens.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_folder(hub.resolve_model(config["model"]))
        data = Path(config["file"]).read_bytes() if config["file"] else sys.stdin.buffer.read()
        ids = tokenizer.encode(data.decode("utf-8"), add_special_tokens=False)
    except (hub.ModelMissing, BadTokenizer) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--file: {config['file']} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError("The text is not UTF-8.") from None
    finding = detect_watermark(ids)
    print(describe_finding(finding, len(ids), config["json"]))
    return 0 if finding.is_marked else 1


def describe_finding(finding: WatermarkResult, tokens: int, as_json: bool) -> str:
    """Return the line to print about a text of this many tokens."""
    share = finding.green / finding.pairs if finding.pairs else 0.0
    if as_json:
        figures = {"tokens": tokens, "pairs": finding.pairs, "green": finding.green, "z": finding.z_score}
        return json.dumps(figures | {"chance": finding.false_positive_rate, "marked": finding.is_marked})
    verdict = "marked" if finding.is_marked else "not marked"
    return (
        f"{verdict}: {share:.1%} of {finding.pairs} pairs ({tokens} tokens) are green, by chance {GREEN_FRACTION:.0%}; "
        f"z = {finding.z_score:.2f}, which a text without a watermark reaches with a probability of "
        f"{finding.false_positive_rate:.2g}"
    )
