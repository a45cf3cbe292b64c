"""Traces of requests: their spans, the headers that connect them across servers, and their export over OTLP."""
