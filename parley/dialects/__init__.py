"""Dialects: what an API's bytes mean. Pure: no sockets, no tokenizer, no engine."""
