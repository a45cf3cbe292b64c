"""The kernels in torch: the definition of each one, and the code that runs where no compiled kernel does."""
