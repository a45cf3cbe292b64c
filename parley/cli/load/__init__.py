"""The load of ``parley bench``: prompts and data sets, the load generator, summaries, charts and comparisons."""
