"""What instructions compute, of arrays; rounded as PTX says, but `.approx` and `.full` exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest, of two the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers to zeros of their sign."""
    is_tiny = np.abs(values) < np.finfo(values.dtype).tiny
    return np.where(is_tiny, np.copysign(values.dtype.type(0), values), values)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Round a product and a sum once: in float64 to odd, and then to float32."""
    if a.dtype == np.float64:
        return _fma_of_float64(a, b, c)
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    is_even = (total.view(np.uint64) & np.uint64(1)) == 0
    is_inexact = (error != 0) & np.isfinite(total) & is_even
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(is_inexact, odd, total).astype(np.float32)


def _fma_of_float64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    result = a * b + c
    for place in np.flatnonzero(np.isfinite(result)):
        x, y, z = (Fraction(float(values[place])) for values in (a, b, c))
        # A zero has a sign, which the plain sum has right.
        result[place] = float(x * y + z) if x * y + z else result[place]
    return result


def greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of zeros the positive one, of a number and NaN the number."""
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def lesser(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a == 0) & (b == 0), -(-a - b), np.fmin(a, b))


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers, towards zero; by zero all bits are set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, ~a.dtype.type(0), (a - np.fmod(a, safe)) // safe)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of integers of 32 bits."""
    wide = np.dtype(f"{a.dtype.kind}8")
    return (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(a.dtype)


def shift_left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    return np.where(by < bits, a << (by & (bits - 1)).astype(a.dtype), a.dtype.type(0))


def shift_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(by, bits - 1).astype(a.dtype)
    return np.where(by < bits, a >> (by & (bits - 1)).astype(a.dtype), a.dtype.type(0))


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Bytes of a and b, each by four bits of the selector: its number, and whether its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(both)
    for shift in range(0, 32, 8):
        chosen = selector.astype(np.uint64) >> np.uint64(shift // 2)
        byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        found |= np.where(chosen & np.uint64(8), sign, byte) << np.uint64(shift)
    return found.astype(np.uint32)


def truncate(values: np.ndarray) -> np.ndarray:
    """To integers of 32 bits, with saturation; NaN to 0."""
    limits = np.iinfo(np.int32)
    whole = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0)
    return np.clip(whole, limits.min, limits.max).astype(np.int32)
