"""The members of requests to MindIE: prompts, media, messages, parameters and constraints, with its refusals."""
