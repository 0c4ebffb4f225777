"""Kernels for CUDA, in Triton; the only modules that import it."""
