"""The dashboards and rules of deploy/ ask for nothing that servers and coordinators do not export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.http_client import MODEL_INFO

from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.ports.metrics import MetricsPort
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.metrics.http_requests import HttpRequestMetrics
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.process import process_lines
from parley.metrics.series import LabelledCounter
from parley.serving.web_pages.metrics_page import fit_buckets, render_metrics_page
from parley.types import EngineStats

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULE_GROUPS = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
RECORDED = {rule["record"] for group in RULE_GROUPS for rule in group["rules"] if "record" in rule}


def exported_names() -> set[str]:
    """Return the names of all series, those of a coordinator included."""
    metrics, requests = ModelMetrics(), HttpRequestMetrics()
    fit_buckets(metrics, 100)
    metrics.key_tokens["", "output"] += 1
    requests.record_request("/v1/chat/completions", "POST", 500, 1.0, "openai", "")
    view = ModelSnapshot("tiny", metrics, EngineStats(), MODEL_INFO, True, True, 1.0, 0)
    options = CoordinatorOptions(instances=(InstanceConfig(id=1, url="http://127.0.0.1:1"),))
    table = InstanceTable(options)
    scheduler = InstanceScheduler(table)
    for counter in (scheduler.counters.ended, scheduler.counters.placements, scheduler.counters.refusals):
        counter.add_count(value="x")

    async def ask(*arguments: Any, **options: Any) -> tuple[int, bytes]:
        raise AssertionError

    pages = render_metrics_page([view], {"http": LabelledCounter("200")}, requests)
    pages += MetricsPort(table, scheduler, ask).own_series() + process_lines()
    return {re.split(r"[{ ]", line)[0] for line in pages.splitlines() if not line.startswith("#")} | {"up"}


def queried_names(expression: str) -> set[str]:
    """Return the names of series in a PromQL expression."""
    bare = re.sub(r'"(\\.|[^"])*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(by|without|on|ignoring|group_left)\s*\([^)]*\)", " ", bare)
    names = set(re.findall(r"(?<![\w:$.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare))
    return names - {"and", "or", "unless", "bool", "by", "without", "on"}


EXPORTED = exported_names()


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_dashboard_queries_name_exported_series(file: Path) -> None:
    board = json.loads(file.read_text("utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) > 10 and all(map(queried_names, expressions))
    assert not set().union(*map(queried_names, expressions)) - EXPORTED - RECORDED
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= variables
    cells = [(x, y) for panel in board["panels"] for x, y in grid_cells(panel["gridPos"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24  # no panel covers another


def grid_cells(place: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in columns for y in rows]


def test_rules_name_exported_series() -> None:
    rules = [rule for group in RULE_GROUPS for rule in group["rules"]]
    assert not set().union(*(queried_names(rule["expr"]) for rule in rules)) - EXPORTED - RECORDED
    for rule in rules:
        if "alert" in rule:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("critical", "warning"), rule


def test_only_rules_have_the_suffix_that_prometheus_reads_rules_by() -> None:
    """The compose file has Prometheus read every *.yml of this folder as rules."""
    assert [file.name for file in (DEPLOY / "prometheus").glob("*.yml")] == ["rules.yml"]


def test_names_are_found_in_expressions() -> None:
    expression = 'histogram_quantile(0.9, sum by (le) (rate(a:b_bucket{c="d{"}[5m]))) / on(x) (up or 0 * vector(1))'
    assert queried_names(expression) == {"a:b_bucket", "up"}
