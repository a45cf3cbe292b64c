"""Commands about this machine: the models in its cache, the shell's completion, and what is installed."""
