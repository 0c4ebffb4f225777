"""Kernels for CPUs, in C++."""

from __future__ import annotations
