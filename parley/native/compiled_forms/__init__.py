"""The kernels in C++, for bfloat16 on the CPU. Each file has the signatures of one operator's C functions, and calls
them.

``compiled_kernels.py`` has the class with all kernels. Its methods have the signatures of the torch forms of the same
names, which define the results. ``library.py`` loads the library that ``native/source/`` is compiled to.
"""
