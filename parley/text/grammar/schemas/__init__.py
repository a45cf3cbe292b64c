"""JSON Schema: from a schema, or the arguments of a tool, to the rules of a grammar."""
