"""As if a shared library of a kernel language were missing."""

raise ImportError("libtiny_kernels.so.7: cannot open shared object file")
