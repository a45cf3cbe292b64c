"""The same as ``anthropic_sdk.py`` with the client that speaks the API's first version. Arguments: HOST:PORT MODEL."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("anthropic_sdk.py")))
