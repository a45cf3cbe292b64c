"""Reads values from a metrics page."""

import re


def value(page: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", page, re.M)
    return float(found)
