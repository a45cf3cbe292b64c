"""The commands of ``parley``, one file each: OPTIONS (its table), USAGE, and ``run(config) -> exit code``."""
