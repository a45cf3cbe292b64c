"""The kernels in torch operators: they define each kernel, and run where there is no compiled or Triton form."""
