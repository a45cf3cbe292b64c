"""Writes docs/configuration.md and docs/cluster.md from the option tables: ``python docs/reference.py``."""

from __future__ import annotations

from pathlib import Path

from parley.coordinator.config import CoordinatorOptions, CoordinatorTls, InstanceConfig, documented_keys
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import Option

ESCAPED = r"\|"  # a bar inside a table cell
PAGE = Path(__file__).with_name("configuration.md")
CLUSTER = Path(__file__).with_name("cluster.md")

INTRODUCTION = """\
# Configuration of `parley serve`

<!-- Made by docs/reference.py from parley/settings/serve_options; change it there. -->

Every option has three spellings: a flag (`--kv-memory 4GB`), an environment variable (`PARLEY_KV_MEMORY=4GB`) and a
key of a TOML file (`kv-memory = "4GB"`) given by `--config FILE` or `PARLEY_CONFIG`. A flag overrides a variable, a
variable overrides the file, and the file overrides the default. `parley serve --show-config` prints every value and its
source.

An unknown flag or key ends the program with exit code 2 and names the nearest known one. An unknown `PARLEY_` variable
only gives a warning.

* SIZE is a number of bytes, or a number with `KB MB GB TB` (powers of 1000) or `KiB MiB GiB TiB` (powers of 1024).
* TIME is a number of seconds, or a number with `ms`, `s`, `m` or `h`.
* A switch is `--name` or `--no-name` as a flag, `true` or `false` elsewhere.
* A repeatable option takes several values: repeat the flag, separate them by commas (MODEL by semicolons), or use an
  array in TOML.
* Keys of the file are at the top, or in a table with the name of a section below, such as `[server]`. Underscores and
  hyphens are equal.
* Do not give API keys as flags where others can list processes: use `PARLEY_API_KEY` or `--api-key-file`.
* Probes need no key: `/health`, `/ping`, `/health/live`, `/health/ready` and Triton's.
* Only the keys of `--admin-key-file` load adapters, change endpoints and roles, clear the prefix cache, pause requests
  and stop the server (`parley routes` lists these routes with the scope `admin`); they can do everything else as well.
  Other keys generate, read and stop their own requests. Without any key every client may do everything.

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
# Configuration file of `parley coordinator`

<!-- Made by docs/reference.py from parley/coordinator/config.py; change it there. -->

The file is TOML, given by `--config FILE`. Keys that MindIE also has keep its names and ranges. An unknown key or a
value out of range ends the program with a message that names key, value and range. Hyphens may replace underscores.
Paths in the file are relative to its folder. [choosing.md](choosing.md) describes how the coordinator uses these keys
to choose instances.

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


def option_table(section: str, options: list[Option]) -> str:
    """Return one section as a Markdown table."""
    rows = [f"\n## {section}\n", "| Flag | Variable | Default | Description |", "|---|---|---|---|"]
    for option in options:
        flag = option.name.upper() if option.positional else f"{option.flag} {option.kind.metavar}".rstrip()
        if option.is_switch and option.default:
            flag = f"--no-{option.name}"
        default = option.unset_text or ("" if option.default in (None, []) else option.format_value(option.default))
        description = option.help_text + (" Repeatable." if option.repeatable else "")
        variable = f"`{option.variable_name}`" if option.configurable else ""
        rows.append(f"| `{flag.replace('|', ESCAPED)}` | {variable} | {default} | {description} |")
    return "\n".join(rows)


def configuration_page() -> str:
    """Return the text of docs/configuration.md."""
    visible = [option for option in SERVE_OPTIONS if not option.hidden]
    sections = dict.fromkeys(option.section for option in visible)
    tables = [
        option_table(section, [option for option in visible if option.section == section]) for section in sections
    ]
    return INTRODUCTION + "\n".join(tables) + "\n"


def cluster_page() -> str:
    """Return the text of docs/cluster.md."""
    parts = [FILE]
    for name, config_class in (
        ("Keys", CoordinatorOptions),
        ("[[instances]]", InstanceConfig),
        ("[tls]", CoordinatorTls),
    ):
        parts += [f"\n## {name}\n\n| Key | Default | Value | Description |\n|---|---|---|---|\n"]
        parts += [
            f"| `{row.key}` | {row.default} | {row.allowed_range} | {row.description} |\n"
            for row in documented_keys(config_class)
        ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(configuration_page(), "utf-8")
    CLUSTER.write_text(cluster_page(), "utf-8")
