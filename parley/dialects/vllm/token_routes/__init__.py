"""Routes of vLLM between prompts and tokens, for servers that tokenize elsewhere than where they generate."""
