"""Reads values from a metrics page."""

import re


def metric_value(page: str, name: str) -> float:
    (number,) = re.findall(rf"^{re.escape(name)} (\S+)$", page, re.M)
    return float(number)
