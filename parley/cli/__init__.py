"""The commands of ``parley``, one file each: OPTIONS (its table), USAGE, and ``run_command(config) -> exit code``."""
