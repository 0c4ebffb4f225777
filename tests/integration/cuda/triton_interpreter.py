"""Triton's interpreter at several times its speed, for tests alone.

What it does for each element, call or type, is done for all at once: the results are the same.
And some of what it does otherwise than Triton is done as Triton does it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from inspect import getcallargs, getfullargspec
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np


def speed_up() -> None:
    """To be called where kernels are interpreted, and nothing is compiled in the same process."""
    from triton.runtime import interpreter

    _patch_language_once(interpreter)
    _find_types_once(interpreter)
    _share_shapes(interpreter.tl)
    _compare_types_at_once(interpreter.tl)
    _leave_out_checks(interpreter)
    _keep_operands(interpreter)
    _call_builtins_at_once(interpreter)
    _sort_at_once(interpreter)
    interpreter.ReduceOps.generic_reduce = _reduce_pairs
    _find_grids_first(interpreter.GridExecutor)
    _take_numbers_for_masks(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """Triton's language, for a module of kernels; else it is at each call, and set back."""
    patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_lang(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def _find_types_once(interpreter: Any) -> None:
    """NumPy's type for one of Triton's; else a dictionary of all is made at each call."""
    find, dtype = interpreter._get_np_dtype, interpreter.tl.dtype
    find_once = cache(find)

    def found(given: Any) -> Any:
        # Those of pointers cannot be hashed.
        return find_once(given.scalar) if type(given.scalar) is dtype else find(given)

    interpreter._get_np_dtype = found


def _share_shapes(tl: Any) -> None:
    """The sizes of types and tensors of one shape; else they are objects of each."""
    make_slowly = tl.block_type.__init__
    no_sizes = tl.constexpr(1), tl.tuple([])

    @lru_cache(None, typed=True)
    def sizes(*shape: int) -> tuple[int, Any, str, Any]:
        made = object.__new__(tl.block_type)
        make_slowly(made, tl.int32, list(shape))
        of_tensor = tl.constexpr(prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
        return made.numel, made.shape, str(made.shape), of_tensor

    def make_type(self: Any, element: Any, shape: Any) -> None:
        unwrapped = [size.value if type(size) is tl.constexpr else size for size in shape]
        self.element_ty = element
        self.numel, self.shape, self.shape_name, self.sizes = sizes(*unwrapped)

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else no_sizes

    def is_same(self: Any, other: Any) -> Any:
        values = other.values if type(other) is tl.tuple else list(other)
        return tl.constexpr(self.values == values)

    tl.tensor.__init__ = make
    tl.block_type.__init__ = make_type
    tl.block_type.name = property(
        lambda self: f"<{self.shape_name}, {self.element_ty}>", lambda self, name: None
    )
    tl.tuple.__eq__ = is_same


def _compare_types_at_once(tl: Any) -> None:
    """Most types that are equal are one object."""
    is_equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def _leave_out_checks(interpreter: Any) -> None:
    """Those whose verdict the interpreter drops without Triton's `debug`, and of its own arrays."""
    semantic = type(interpreter.interpreter_semantic)
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _keep_operands(interpreter: Any) -> None:
    """Operands of one type and shape as they are, and numbers in the type and shape of the other.

    Else each operation asks again for the types of both, and makes an array of a number.
    """
    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    # 16 bits are widened to be divided.
    plain = {tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.float32, tl.float64}
    plain |= {tl.uint8, tl.uint16, tl.uint32, tl.uint64}
    numbers: dict[Any, Any] = {}

    def check_once(self: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = getattr(left, "dtype", None)
        if type(dtype) is not tl.dtype or dtype not in plain:
            return check(self, left, right, *args, **kwargs)
        shape = left.shape
        if type(right) is tl.tensor:
            if shape is right.shape and dtype is right.dtype:
                return left, right
        elif type(right) in (int, float, bool):
            # The shapes of `_share_shapes` live on.
            key = dtype, id(shape), type(right), right, args, *kwargs.items()
            if key in numbers:
                return left, numbers[key]
            operand, number = check(self, left, right, *args, **kwargs)
            if operand is left:
                number.handle.data.flags.writeable = False
                numbers[key] = number
            return operand, number
        return check(self, left, right, *args, **kwargs)

    semantic.binary_op_type_checking_impl = check_once


def _call_builtins_at_once(interpreter: Any) -> None:
    """Triton's functions, told of the interpreter without the layers that look for it."""
    semantic = interpreter.interpreter_semantic
    wrapper = interpreter.tl.core.builtin(lambda: None).__code__

    def patch(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        is_wrapped = getattr(member, "__code__", None) is wrapper
        function = member.__wrapped__ if is_wrapped else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _sort_at_once(interpreter: Any) -> None:
    """`tl.topk` by NumPy; else each swap of its network is a dozen calls."""
    tl = interpreter.tl

    def topk(x: Any, k: Any, dim: Any = None) -> Any:
        k = getattr(k, "value", k)
        # What Triton takes, in all versions.
        assert dim in (None, x.handle.data.ndim - 1)
        assert 2 <= k <= x.handle.data.shape[-1]
        assert x.handle.data.dtype.kind in "iu"
        largest = np.sort(x.handle.data, axis=-1)[..., : -k - 1 : -1].copy()
        made = tl.block_type(x.dtype, largest.shape)
        return tl.tensor(interpreter.TensorHandle(largest, x.dtype), made)

    tl.topk = topk


def _find_grids_first(executor: Any) -> None:
    """Before arguments are made Triton's: vLLM has a grid that puts others in their place."""
    launch = executor.__call__

    def launch_on_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        if callable(self.grid):
            names = getfullargspec(self.fn).args
            kwargs = {name: value for name, value in kwargs.items() if name in names}
            args, kwargs = (), getcallargs(self.fn, *args, **kwargs)
            self.grid = self.grid(kwargs)
        launch(self, *args, **kwargs)

    executor.__call__ = launch_on_grid


def _take_numbers_for_masks(interpreter: Any) -> None:
    """A mask and a Python bool are a number to the interpreter, and no mask any more."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def mask_of(mask: Any) -> Any:
        is_mask = mask.data.dtype == bool
        return mask if is_mask else interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, mask_of(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(
        self, at, value, mask_of(mask), *rest
    )


def _reduce_pairs(self: Any, given: tuple) -> list:
    """Reduce by an associative function: neighbours with each other, as often as that takes.

    In the place of one element with the next; axes are as long as a power of two.
    """
    given, axis = self.unravel(given, self.axis)
    types = [tensor.dtype for tensor in given]
    parts = [tensor.handle.data for tensor in given]
    num_axes = parts[0].ndim
    before = (slice(None),) * axis
    while parts[0].shape[axis] > 1:
        pairs = [
            self.to_tensor(part[(*before, slice(first, None, 2))], dtype)
            for first in (0, 1)
            for part, dtype in zip(parts, types, strict=True)
        ]
        combined = self.combine_fn.fn(*pairs)
        combined = combined if isinstance(combined, tuple) else (combined,)
        parts = [
            tensor.handle.data.astype(part.dtype)
            for tensor, part in zip(combined, parts, strict=True)
        ]
    if not self.keep_dims:
        parts = [part.squeeze(axis) for part in parts]
    elif self.axis is None:
        parts = [part.reshape((1,) * num_axes) for part in parts]
    return [self.to_tensor(part, dtype) for part, dtype in zip(parts, types, strict=True)]
