"""The kernels of the CPU path, by name. Each has one signature; every implementation of it gives the same bits per row."""
