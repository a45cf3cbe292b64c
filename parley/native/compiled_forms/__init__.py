"""The kernels in C++, for bfloat16 on the CPU: one file describes the functions of one operator and calls them.

``compiled_kernels.py`` has the class with all of them. The functions have the signatures of the torch forms of the same
names, which define the results. ``library.py`` loads the library that ``native/source/`` is compiled to.
"""
