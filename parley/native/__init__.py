"""The kernels of the CPU path, by name. One signature each; a row's bits never depend on the other rows."""
