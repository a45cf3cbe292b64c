"""Numbers that a process counts, and how Prometheus' text format writes them. Knows no API's names for them."""
