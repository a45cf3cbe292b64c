"""The kernels in torch: what each one computes, and what runs where no compiled kernel does."""
