"""The functions of the kernel table, by the part of a model that calls them; ``parley.native`` exports all."""
