"""Writes docs/configuration.md and docs/cluster.md from the tables of options: ``python docs/reference.py`` (or
``make docs``)."""

from __future__ import annotations

from pathlib import Path

from parley.coordinator.config import CoordinatorOptions, CoordinatorTls, InstanceConfig, documented_keys
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import Option

ESCAPED = r"\|"  # a bar inside a cell
PAGE = Path(__file__).with_name("configuration.md")
CLUSTER = Path(__file__).with_name("cluster.md")

INTRODUCTION = """\
# Configuration of `parley serve`

<!-- Made by docs/reference.py from parley/settings/config.py; change it there. -->

Every option has three spellings: a flag (`--kv-memory 4GB`), an environment variable (`PARLEY_KV_MEMORY=4GB`) and a
key of a TOML file (`kv-memory = "4GB"`), which `--config FILE` or `PARLEY_CONFIG` names. A flag wins over a variable,
a variable over the file, the file over the default. `parley serve --show-config` prints every value and where it came
from.

A word that parley does not know is refused with exit code 2 and the nearest known one; an unknown `PARLEY_` variable
only gives a warning.

* SIZE is a number of bytes, or one with `KB MB GB TB` (powers of 1000) or `KiB MiB GiB TiB` (powers of 1024).
* TIME is a number of seconds, or one with `ms`, `s`, `m` or `h`.
* A switch is `--name` or `--no-name` as a flag, `true` or `false` elsewhere.
* A repeatable option takes several values: the flag again and again, commas (for MODEL semicolons), or an
  array in TOML.
* Keys in a file may stand at the top or under a table named as the headings below, such as `[server]`. Underscores
  are as good as hyphens.
* Do not give API keys as flags where others can list processes: use `PARLEY_API_KEY` or `--api-key-file`.
* Probes need no key: `/health`, `/ping`, `/health/live`, `/health/ready` and Triton's.
* With `--admin-key-file`, other keys generate, look and stop requests, and only those of that file load adapters, make
  endpoints, empty the prefix cache, hold requests back and end the server. They do all that other keys do, too.

```toml
model = "./my-model"

[engine]
kv-memory = "4GiB"

[server]
host = "0.0.0.0"
api-key-file = "/etc/parley/keys"
```
"""

FILE = """\
# The file of `parley coordinator`

<!-- Made by docs/reference.py from parley/coordinator/config.py; change it there. -->

TOML, given by `--config FILE`. Names and ranges are MindIE's where it has the key. Unknown keys and values out of range
end the start with a message that names key, value and range; hyphens may replace underscores. Paths in the file are
relative to it. [choosing.md](choosing.md) describes how instances are chosen with these keys.

```toml
predict_port = 8000
slo_ttft = 2.0
secret_file = "cluster.secret"

[[instances]]
url = "http://10.0.0.1:8000"
role = "prefill"

[[instances]]
url = "http://10.0.0.2:8000"
role = "decode"
```
"""


def table(section: str, options: list[Option]) -> str:
    """One section as a Markdown table."""
    rows = [f"\n## {section}\n", "| Flag | Variable | Default | What it does |", "|---|---|---|---|"]
    for option in options:
        flag = option.name.upper() if option.positional else f"{option.flag} {option.kind.metavar}".rstrip()
        if option.is_switch and option.default:
            flag = f"--no-{option.name}"
        default = option.unset_text or ("" if option.default in (None, []) else option.format_value(option.default))
        about = option.help_text + (" Repeatable." if option.repeatable else "")
        variable = f"`{option.variable_name}`" if option.configurable else ""
        rows.append(f"| `{flag.replace('|', ESCAPED)}` | {variable} | {default} | {about} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    shown = [option for option in SERVE_OPTIONS if not option.hidden]
    sections = dict.fromkeys(option.section for option in shown)
    tables = [table(section, [option for option in shown if option.section == section]) for section in sections]
    return INTRODUCTION + "\n".join(tables) + "\n"


def cluster() -> str:
    """The whole page of the coordinator's file."""
    parts = [FILE]
    for name, kind in (("Keys", CoordinatorOptions), ("[[instances]]", InstanceConfig), ("[tls]", CoordinatorTls)):
        parts += [f"\n## {name}\n\n| Key | Default | Is | What it does |\n|---|---|---|---|\n"]
        parts += [
            f"| `{row.key}` | {row.default} | {row.allowed_range} | {row.description} |\n"
            for row in documented_keys(kind)
        ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    CLUSTER.write_text(cluster(), "utf-8")
