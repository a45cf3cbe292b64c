"""The coordinator's file: accepted keys and values, and error messages for mistakes."""

import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from parley.coordinator.config import (
    CoordinatorOptions,
    CoordinatorTls,
    InstanceConfig,
    documented_keys,
    load_coordinator_config,
    parse_coordinator_config,
)
from parley.settings.options import ConfigError

EXAMPLE = """
predict_port = 8025
status-port = 8029
max_requests = 90000
body_limit = "4MB"
load_cost_values = "1, 0"
secret_file = "secret"
slo_ttft = 0.5

[tls]
ca = "ca.pem"

[[instances]]
url = "http://10.0.0.1:8000"
role = "prefill"

[[instances]]
url = "http://[::1]:8000/"
role = "decode"
id = 9
group = 3
"""


def test_reads_the_coordinator_file_and_fills_in_defaults(tmp_path):
    (tmp_path / "secret").write_text("# as instances read it\nxyz\n")
    (tmp_path / "c.toml").write_text(EXAMPLE)
    options = load_coordinator_config(str(tmp_path / "c.toml"))
    assert (options.predict_port, options.status_port, options.management_port) == (8025, 8029, 1026)
    assert (options.max_requests, options.body_limit, options.slo_ttft) == (90_000, 4_000_000, 0.5)
    assert options.load_cost_values == (1.0, 0.0)
    assert options.secret == "xyz" and "xyz" not in repr(options)
    assert options.tls.ca == str(tmp_path / "ca.pem")
    assert [(place.id, place.role, place.group) for place in options.instances] == [(1, "prefill", 0), (9, "decode", 3)]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"max_requests": 0}, ["max_requests", "0", "from 1 to 90000"]),
        ({"max_requests": 90_001}, ["max_requests", "90001", "from 1 to 90000"]),
        ({"max_requests": True}, ["max_requests", "True", "from 1 to 90000"]),
        ({"max_request": 5}, ["unknown key max_request", "Did you mean max_requests?"]),
        ({"max_requests": 5, "max-requests": 5}, ["max_requests is given twice"]),
        ({"string_token_rate": "many"}, ["string_token_rate", "'many'", "from 0.01 to 1000"]),
        ({"algorithm_type": "best"}, ["algorithm_type", "'best'", "load_balance"]),
        ({"load_cost_coefficient": [1, 2]}, ["load_cost_coefficient", "2 numbers are not 9"]),
        ({"load_cost_values": ["1", "x"]}, ["load_cost_values", "'x'", "a number from"]),
        ({"load_cost_coefficient": "0,0,0,0,0,0,0,0,0"}, ["load_cost_coefficient", "fourth"]),
        ({"default_p_rate": 1}, ["default_p_rate", "default_d_rate"]),
        ({"secret": 5}, ["secret: the value is not text"]),
        ({"secret": "a", "secret_file": "b"}, ["only one"]),
        ({"secret": "a\r\nb: c"}, ["secret", "printable ASCII"]),
        ({"secret_file": "/nonexistent/x"}, ["secret_file", "cannot be read"]),
        ({"instances": {}}, ["[[instances]]"]),
        ({"instances": [{"role": "decode"}]}, ["instances[1]", "url is missing"]),
        ({"instances": [{"url": "10.0.0.1:8000"}]}, ["instances[1]: url", "http://HOST:PORT"]),
        ({"instances": [{"url": "http://a", "role": "p"}]}, ["instances[1]: role", "'p'", "mixed, prefill"]),
        ({"instances": [{"url": "http://a:65536"}]}, ["instances[1]: url", "http://a:65536", "http://HOST:PORT"]),
        ({"instances": [{"url": "http://a:0"}]}, ["instances[1]: url", "http://HOST:PORT"]),
        ({"instances": [{"url": "http://a", "peer": "10.0.0.1:1121"}]}, ["instances[1]: peer", "IP;PORT"]),
        ({"instances": [{"url": "http://a"}, {"url": "http://a/"}]}, ["two instances have the url"]),
        ({"instances": [{"url": "http://a", "id": 2}, {"url": "http://b"}]}, ["two instances have the id 2"]),
        ({"tls": 1}, ["[tls]"]),
        ({"tls": {"key": "k.pem"}}, ["certificate and key go together"]),
        ({"tls": {"clients": "ca.pem"}}, ["tls: clients needs certificate and key"]),
        ({"tls": {"password": "word"}}, ["tls: password needs certificate and key"]),
        ({"host": "a\0"}, ["host", "is not text"]),
        ({"secret_file": "a\0"}, ["secret_file", "is not text"]),
        (
            {"algorithm_type": "cache_affinity", "instances": [{"url": "http://a", "role": "decode"}]},
            ["cache_affinity", "mixed"],
        ),
    ],
)
def test_coordinator_file_errors_name_key_value_and_range(content, parts):
    with pytest.raises(ConfigError) as error:
        parse_coordinator_config(content, "c.toml")
    assert str(error.value).startswith("c.toml: ")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("content", ["= 5", "a = 1\na = 2", "x = " + "[" * 10_000, "\x00"])
def test_rejects_a_coordinator_file_that_is_not_toml(tmp_path, content):
    (tmp_path / "c.toml").write_text(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_coordinator_config(str(tmp_path / "c.toml"))


def test_coordinator_defaults_are_valid_file_values():
    for kind in (CoordinatorOptions, InstanceConfig, CoordinatorTls):
        for config_field in fields(kind):
            if config_field.metadata and config_field.default not in (None, ""):
                values = config_field.default if config_field.metadata["many"] else (config_field.default,)
                for value in values:
                    assert config_field.metadata["kind"].parse_raw(value) == value
        assert all(row.description and row.allowed_range for row in documented_keys(kind))


def test_cluster_page_matches_the_config_classes():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "reference.py"))
    assert script["CLUSTER"].read_text("utf-8") == script["cluster_page"](), "docs/cluster.md is old: make docs"
