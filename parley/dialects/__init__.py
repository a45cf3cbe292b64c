"""Dialects: the meaning of each API's bytes. Pure: no sockets, no tokenizer, no engine."""
