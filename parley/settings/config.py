"""The options of a server, as one table. Flags, environment variables, file, help and documentation derive from it.

To add an option: add a row to a table of ``serve_options``, then a field and a line that copies it, in
``engine_settings`` (options of the engine) or in the server's own options. ``CLIENT_OPTIONS`` holds the two options
shared by all commands that talk to a running server. ``options`` determines the value of an option. Imports nothing
heavy.
"""

from __future__ import annotations

from parley.settings.option_kinds import text_kind
from parley.settings.options import Option
from parley.settings.serve_options.access_options import ACCESS_OPTIONS
from parley.settings.serve_options.answer_options import ANSWER_OPTIONS
from parley.settings.serve_options.cluster_options import CLUSTER_OPTIONS
from parley.settings.serve_options.engine_options import ENGINE_OPTIONS
from parley.settings.serve_options.media_options import MEDIA_OPTIONS
from parley.settings.serve_options.model_options import MODEL_OPTIONS
from parley.settings.serve_options.output_options import OUTPUT_OPTIONS
from parley.settings.serve_options.port_options import PORT_OPTIONS

SERVE_OPTIONS: list[Option] = [
    *MODEL_OPTIONS,
    *ENGINE_OPTIONS,
    *PORT_OPTIONS,
    *ACCESS_OPTIONS,
    *ANSWER_OPTIONS,
    *MEDIA_OPTIONS,
    *CLUSTER_OPTIONS,
    *OUTPUT_OPTIONS,
]

CLIENT_OPTIONS: list[Option] = [
    Option(
        "url",
        text_kind("URL"),
        "Address of the server.",
        unset_text="http://127.0.0.1:8000",
        section="server",
        configurable=True,
    ),
    Option(
        "api-key",
        text_kind("KEY"),
        "Key to send.",
        section="server",
        repeatable=True,
        configurable=True,
        secret=True,
    ),
]

KNOWN_VARIABLES = sorted(
    {option.variable_name for option in SERVE_OPTIONS + CLIENT_OPTIONS if option.configurable} | {"PARLEY_NATIVE"}
)
