"""The metric of the store of responses, which a server and a coordinator have."""

from __future__ import annotations

from parley.metrics.series import scalar_lines


def record_fault_lines(faults: int) -> str:
    """Render how often the store of responses could not be used."""
    name, help_text = "parley:record_faults_total", "Uses of the store of responses that failed."
    return scalar_lines("counter", name, help_text, [("", [("", faults)])])
