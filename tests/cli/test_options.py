"""Where option values come from, which values are valid, and the errors for invalid ones."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.settings import config
from parley.settings.config import CLIENT_OPTIONS, KNOWN_VARIABLES, SERVE_OPTIONS
from parley.settings.engine_settings import engine_settings
from parley.settings.media_hosts import MediaHost
from parley.settings.option_kinds import (
    OptionKind,
    choice_kind,
    duration_kind,
    format_size,
    integer_kind,
    media_host_kind,
    media_limit_kind,
    number_kind,
    size_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import (
    ConfigError,
    Option,
    did_you_mean,
    format_help,
    format_options,
    read_options_file,
    resolve_options,
)

TABLE = [
    Option("alpha", integer_kind(-5, 500), "A number.", 1, section="one", configurable=True),
    Option("beta-two", text_kind(), "Some text.", section="one", configurable=True),
    Option("gamma", switch_kind(), "On or off.", False, section="two", configurable=True),
    Option("delta", switch_kind(), "On unless disabled.", True, section="two", configurable=True),
    Option("many", text_kind(), "Several.", section="two", repeatable=True, configurable=True),
    Option("size", size_kind(), "Bytes.", section="two", configurable=True),
    Option("config", text_kind("FILE"), "File.", section="two", configurable=True),
]
WORDS = st.text("abcdefghij", min_size=1, max_size=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "alpha": st.integers(-5, 500),
    "beta-two": WORDS,
    "gamma": st.booleans(),
    "delta": st.booleans(),
    "many": st.lists(WORDS, min_size=1, max_size=3),
    "size": st.integers(0, 1 << 50),
}
LAYER = st.fixed_dictionaries({}, optional=VALUES)


def as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


def as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def as_flags(layer: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in layer.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [word for item in value for word in (f"--{name}", item)]
        else:
            words += [f"--{name}", str(value)] if len(words) % 2 else [f"--{name}={value}"]
    return words


@given(flags=LAYER, variables=LAYER, file=LAYER, sections=st.booleans())
def test_highest_source_wins_for_every_option(tmp_path_factory, flags, variables, file, sections):
    path = tmp_path_factory.mktemp("config") / "p.toml"
    lines = [f"{name.replace('-', '_')} = {as_toml(value)}" for name, value in file.items()]
    if sections:
        lines = [
            line
            for part in ("one", "two")
            for line in [f"[{part}]", *(f"{n} = {as_toml(v)}" for n, v in file.items() if option_section(n) == part)]
        ]
    path.write_text("\n".join(lines))
    environment = {f"PARLEY_{name.upper().replace('-', '_')}": as_text(value) for name, value in variables.items()}
    resolved = resolve_options(TABLE, [*as_flags(flags), "--config", str(path)], environment)
    for option in TABLE[:-1]:
        layers = [(flags, "--"), (variables, "PARLEY_"), (file, str(path))]
        value, source = next(
            ((layer[option.name], source) for layer, source in layers if option.name in layer),
            ([] if option.repeatable else option.default, "default"),
        )
        assert resolved[option.name] == value, option.name
        assert resolved.source_of(option.name).startswith(source)
        assert resolved.is_set(option.name) == (source != "default")
    assert not resolved.warnings


def option_section(name: str) -> str:
    return next(option.section for option in TABLE if option.name == name)


def test_config_flag_overrides_the_config_variable(tmp_path):
    (tmp_path / "a.toml").write_text("alpha = 2")
    (tmp_path / "b.toml").write_text("alpha = 3")
    environment = {"PARLEY_CONFIG": str(tmp_path / "a.toml")}
    assert resolve_options(TABLE, [], environment)["alpha"] == 2
    assert resolve_options(TABLE, ["--config", str(tmp_path / "b.toml")], environment)["alpha"] == 3


def test_empty_environment_variable_counts_as_unset():
    assert resolve_options(TABLE, [], {"PARLEY_ALPHA": "", "PARLEY_BETA_TWO": ""})["alpha"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alhpa", "3"], "Unknown flag --alhpa. Did you mean --alpha?"),
        (["--no-gama"], "Unknown flag --no-gama. Did you mean --no-gamma?"),
        (["--qqqq"], "Unknown flag --qqqq."),
        (["--no-alpha"], "Unknown flag --no-alpha. Did you mean --alpha?"),
        (["--alpha"], "--alpha needs a value (N)."),
        (["--alpha", "--gamma"], "--alpha needs a value (N)."),
        (["--gamma=yes"], "--gamma takes no value; write --gamma or --no-gamma."),
        (["--alpha", "x"], "--alpha: 'x' is not a whole number from -5 to 500."),
        (["--alpha", "501"], "--alpha: '501' is not a whole number from -5 to 500."),
        (["--beta-two="], "--beta-two: '' is not text."),
        (["--size", "4G"], "--size: '4G' is not a size of at least 0, such as 512MiB, 4GB or a number of bytes."),
        (["beta"], "Unexpected argument 'beta'."),
        (["--config", "/does/not/exist"], "The file /does/not/exist cannot be read: No such file or directory."),
    ],
)
def test_rejects_an_invalid_flag_in_one_sentence(words, message):
    with pytest.raises(ConfigError) as error:
        resolve_options(TABLE, words, {})
    assert str(error.value).startswith(message)


def test_parses_a_negative_number_as_a_value():
    assert resolve_options(TABLE, ["--alpha", "-3"], {})["alpha"] == -3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("alhpa = 1", "unknown key alhpa. Did you mean alpha?"),
        ("[oen]\nalpha = 1", "unknown key oen. Did you mean one?"),
        ("[two]\nalpha = 1", "unknown key alpha in [two]. It belongs in [one]."),
        ("alpha = 1\n[one]\nalpha = 2", "alpha is given twice"),
        ("alpha = true", "alpha: True is not a whole number from -5 to 500."),
        ("alpha = 1.5", "alpha: 1.5 is not a whole number from -5 to 500."),
        ("gamma = 1", "1 is not true or false."),
        ("beta_two = 5", "5 is not text."),
        ("beta_two = ['a']", "['a'] is not text."),
        ("many = [1]", "1 is not text."),
        ("config = 'x'", "unknown key config."),
        ("alpha = ", "is not valid TOML"),
        ("alpha = " + "[" * 5000, "is not valid TOML"),
        ("alpha = " + "9" * 5000, "is not valid TOML"),
    ],
)
def test_rejects_an_invalid_config_file_by_name(tmp_path, content, message):
    path = tmp_path / "p.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        resolve_options(TABLE, ["--config", str(path)], {})
    assert str(path) in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_rejects_a_config_file_that_is_not_text(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_options_file(TABLE, str(tmp_path / "p.toml"))


def test_rejects_an_invalid_variable_and_warns_about_unknown_ones():
    with pytest.raises(ConfigError, match="PARLEY_ALPHA: 'x' is not"):
        resolve_options(TABLE, [], {"PARLEY_ALPHA": "x"})
    resolved = resolve_options(TABLE, [], {"PARLEY_ALHPA": "1", "PARLEY_OTHER": "1", "HOME": "/"}, ["PARLEY_OTHER"])
    assert resolved.warnings == ["Unknown variable PARLEY_ALHPA. Did you mean PARLEY_ALPHA?"]


def test_variables_of_kubernetes_services_are_no_options():
    """Kubernetes sets them in each pod near a service named parley, or parley-decode."""
    service = {
        "PARLEY_PORT": "tcp://10.0.0.1:8000",
        "PARLEY_SERVICE_HOST": "10.0.0.1",
        "PARLEY_SERVICE_PORT": "8000",
        "PARLEY_SERVICE_PORT_HTTP": "8000",
        "PARLEY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PARLEY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PARLEY_DECODE_PORT": "tcp://10.0.0.2:8000",
    }
    resolved = resolve_options(SERVE_OPTIONS, [], service)
    assert resolved["port"] == 8000 and resolved.warnings == []
    assert resolve_options(SERVE_OPTIONS, [], service | {"PARLEY_PORT": "9000"})["port"] == 9000


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (size_kind(), "4GB", 4_000_000_000),
        (size_kind(), "512MiB", 512 << 20),
        (size_kind(), "1.5gib", 3 << 29),
        (size_kind(), "10 kb", 10_000),
        (size_kind(), "7", 7),
        (size_kind(), 7, 7),
        (duration_kind(), "30", 30.0),
        (duration_kind(), "500ms", 0.5),
        (duration_kind(), "2m", 120.0),
        (duration_kind(), "1h", 3600.0),
        (duration_kind(), "7d", 604800.0),
        (duration_kind(), 1.5, 1.5),
        (duration_kind(2, or_zero=True), "0", 0.0),
        (number_kind(0, 1), "0.25", 0.25),
        (number_kind(0, 1), 1, 1.0),
        (integer_kind(1), "8", 8),
        (switch_kind(), "On", True),
        (switch_kind(), "0", False),
        (choice_kind("a", "b"), "b", "b"),
        (media_host_kind(), "Example.COM.", MediaHost("example.com")),
        (media_host_kind(), "*.example.com:8443", MediaHost("*.example.com", 8443)),
        (media_host_kind(), "b\u00fccher.example", MediaHost("xn--bcher-kva.example")),
        (media_host_kind(), "internal:minio:9000", MediaHost("minio", 9000, internal=True)),
        (media_host_kind(), "10.0.0.5", MediaHost("10.0.0.5", internal=True)),
        (media_host_kind(), "internal:[fd00::1]:80", MediaHost("fd00::1", 80, internal=True)),
        (media_host_kind(), "any-public", MediaHost("any-public")),
        (media_limit_kind(integer_kind(0, 9)), "image=4", ("image", 4)),
        (media_limit_kind(size_kind(1)), "video=1GiB", ("video", 1 << 30)),
    ],
)
def test_option_kinds_read_common_spellings(kind: OptionKind, raw, value):
    assert kind.parse_raw(raw) == value
    assert kind.parse_raw(kind.format_value(value)) == value


@pytest.mark.parametrize(
    ("kind", "raws"),
    [
        (size_kind(10), ["", "9", "-1", "4X", "1e9", "0x10", "GB", True, 1.5, None, [], "9" * 400]),
        (duration_kind(1, 3600), ["0", "999ms", "1.1h"]),
        (duration_kind(2, or_zero=True), ["1", "-2", "0.001"]),
        (duration_kind(), ["", "-1", "1w", "nan", True, None, float("nan"), float("inf"), 1e300]),
        (number_kind(0, 1), ["", "nan", "inf", "2", "-0.1", True, None, [], 10**400]),
        (integer_kind(1, 9), ["", "0", "10", "1.0", 2.0, True, None, "9" * 5000]),
        (switch_kind(), ["", "maybe", 1, 0, None]),
        (choice_kind("a"), ["", "A", 1, [], None]),
        (text_kind(), ["", 1, None, [], {}]),
        (media_host_kind(), ["", "*", "*.", "*.10.0.0.5", "internal:", "internal:any-public", "http://a.example", 1]),
        (
            media_host_kind(),
            ["a.example/path", "a b", "a.example:0", "a.example:65536", "127.1", "0x7f.1", "a..b", None],
        ),
        (media_limit_kind(integer_kind(0, 9)), ["", "image", "image=", "image=10", "picture=1", "=1", "image=1=2", 4]),
    ],
)
def test_option_kinds_reject_invalid_values(kind: OptionKind, raws):
    for raw in raws:
        with pytest.raises(ValueError):
            kind.parse_raw(raw)


@given(st.integers(0, 10**18 - 1))
def test_shown_size_reads_back_unchanged(count):
    assert size_kind().parse_raw(format_size(count)) == count


def test_flags_are_unique_and_listed_in_the_help():
    for table in (SERVE_OPTIONS, CLIENT_OPTIONS):
        assert len({option.name for option in table}) == len(table)
        help_text = format_help(table)
        for option in table:
            assert option.hidden or option.name in help_text.replace("[no-]", "") or option.name.upper() in help_text
    assert all(len(line) <= 110 for line in format_help(SERVE_OPTIONS).splitlines())


def test_show_config_names_each_source_and_hides_keys():
    resolved = resolve_options(
        SERVE_OPTIONS, ["--port", "9"], {"PARLEY_API_KEY": "sesame,other", "PARLEY_DTYPE": "fp32"}, KNOWN_VARIABLES
    )
    lines = {line.split()[0]: line for line in format_options(SERVE_OPTIONS, resolved).splitlines()}
    assert lines["port"].split()[1:] == ["9", "--port"]
    assert lines["dtype"].split()[1:] == ["fp32", "PARLEY_DTYPE"]
    assert lines["host"].split()[1:] == ["127.0.0.1", "default"]
    assert lines["api-key"].endswith("PARLEY_API_KEY")
    assert "sesame" not in "".join(lines.values())
    assert set(lines) == {option.name for option in SERVE_OPTIONS if not option.hidden}


def test_error_about_an_invalid_api_key_does_not_print_it():
    with pytest.raises(ConfigError) as error:
        resolve_options(SERVE_OPTIONS, ["--api-key", "secret,,x"], {})
    assert "secret" not in str(error.value)


def test_shown_defaults_read_back_from_a_config_file(tmp_path):
    """Writing any shown default into a config file changes nothing."""
    default = resolve_options(SERVE_OPTIONS, [], {})
    rows = [
        (o, o.format_value(default[o.name]))
        for o in SERVE_OPTIONS
        if o.configurable and default[o.name] not in (None, [])
    ]
    path = tmp_path / "p.toml"
    path.write_text("\n".join(f'{option.name} = "{value}"' for option, value in rows))
    assert tomllib.loads(path.read_text())
    resolved = resolve_options(SERVE_OPTIONS, ["--config", str(path)], {})
    assert {o.name: resolved[o.name] for o, _ in rows} == {o.name: default[o.name] for o, _ in rows}


def test_settings_carry_the_engine_options():
    flags = ["--dtype", "fp32", "--kv-memory", "64MiB", "--max-model-len", "99", "--no-prefix-cache", "--threads", "1"]
    flags += ["--quantization", "int8", "--kv-dtype", "int8", "--media-cache", "5MiB"]
    parsed = engine_settings(
        resolve_options(SERVE_OPTIONS, [*flags, "--max-batch", "3", "--step-ms", "7", "--no-lowering"], {}), "/folder"
    )
    assert (parsed.model, parsed.dtype, parsed.kv_memory, parsed.max_model_len) == ("/folder", "float32", 64 << 20, 99)
    assert (parsed.prefix_cache, parsed.threads, parsed.max_batch, parsed.step_ms, parsed.lowering) == (
        False,
        1,
        3,
        7.0,
        False,
    )
    assert (parsed.quantization, parsed.kv_dtype, parsed.media_cache) == ("int8", "int8", 5 << 20)


def test_parser_options_accept_aliases_of_model_families():
    parsed = engine_settings(
        resolve_options(SERVE_OPTIONS, ["--tool-parser", "Qwen3-Coder", "--reasoning-parser", "none"], {}), "m"
    )
    assert (parsed.tool_parser, parsed.reasoning_parser) == ("qwen3_coder", "none")
    with pytest.raises(ConfigError, match=r"--tool-parser: 'klingon' is not one of auto, none, .*hermes"):
        resolve_options(SERVE_OPTIONS, ["--tool-parser", "klingon"], {})


def test_option_to_trust_special_tokens_reaches_the_settings():
    assert engine_settings(resolve_options(SERVE_OPTIONS, ["--trust-marks"], {}), "m").trust_marks


def test_default_options_equal_the_default_engine_settings():
    from parley.types import ParleySettings

    assert engine_settings(resolve_options(SERVE_OPTIONS, [], {}), "m") == ParleySettings(model="m")


def test_configuration_page_is_generated_from_the_option_table():
    script = runpy.run_path(str(Path(config.__file__).parents[2] / "docs" / "reference.py"))
    page = script["PAGE"].read_text("utf-8")
    assert page == script["configuration_page"](), "docs/configuration.md is old: make docs"
    assert all(option.help_text in page for option in SERVE_OPTIONS if not option.hidden)


def test_nearest_suggests_nothing_for_distant_words():
    assert did_you_mean("zzzz", ["alpha"]) == ""


def test_reads_cluster_options(tmp_path):
    from parley.cli.serve import offered_models
    from parley.cli.serve_config.server_options import server_options

    def options(*flags):
        return server_options(resolve_options(SERVE_OPTIONS, list(flags), {}))

    assert (options().role, options().peer_port) == ("mixed", None)
    parsed = options("--role", "decode", "--peer-port", "0", "--cluster-secret", "s3")
    assert (parsed.role, parsed.peer_port, parsed.cluster_secret) == ("decode", 0, "s3")
    assert (parsed.peer_lease, parsed.peer_checksum) == (30.0, False)
    parsed = options("--peer-lease", "2m", "--peer-checksum")
    assert (parsed.peer_lease, parsed.peer_checksum) == (120.0, True)
    (tmp_path / "secret").write_text("s4\n")
    assert options("--cluster-secret-file", str(tmp_path / "secret")).cluster_secret == "s4"
    for wrong in (
        ["--cluster-secret", "a", "--cluster-secret-file", "b"],
        ["--cluster-secret", "ä"],
        ["--cluster-cert", "a"],
    ):
        with pytest.raises(ConfigError, match="--cluster"):
            options(*wrong)
    (parsed,) = offered_models(
        resolve_options(SERVE_OPTIONS, ["--role", "prefill", "--device", "cuda", "--kv-staging", "3MiB"], {})
    )
    assert parsed.settings.shared and parsed.settings.staging == 3 << 20
