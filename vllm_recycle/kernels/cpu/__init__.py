"""Kernels for CPU: C++, and the torch functions that do the work where there is no compiler."""
