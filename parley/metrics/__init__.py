"""Counters and histograms of a process, and Prometheus' text format. Metric names are defined by the dialects."""
