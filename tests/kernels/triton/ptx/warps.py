"""Instructions of whole warps: exchanges between lanes, and products of matrices.

Masks have all lanes of a warp or none. Products are summed in float64, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.triton.ptx.arithmetic import from_bf16
from tests.kernels.triton.ptx.faults import AccessError, UnsupportedError
from tests.kernels.triton.ptx.memory import SHARED_START
from tests.kernels.triton.ptx.operands import Effect, Mask, Site

# Of a fragment of 8 x 8 elements each lane has two that lie side by side.
ROW, COLUMN = np.arange(32) // 4, np.arange(32) % 4 * 2
HALVES = ("bf16", "f16")
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


def _warps(site: Site, mask: Mask) -> np.ndarray:
    """Return the lanes of the warps that take part, [warps, 32]."""
    return site.lanes(mask).reshape(-1, 32)


def _check_all_lanes(members: np.ndarray, lanes: np.ndarray) -> None:
    if (members[lanes] != 0xFFFFFFFF).any():
        raise UnsupportedError("a part of a warp's lanes")


def _barrier(site: Site) -> Effect:
    members, machine = site.read(site.instruction.operands[0], "b32"), site.machine

    def wait(mask: Mask) -> None:
        lanes = site.lanes(mask)
        _check_all_lanes(members, lanes)
        machine.memory.clock.warp_epochs[lanes] += 1

    return wait


def _shuffle(site: Site) -> Effect:
    value, selector, clamp, members = (site.read(operand, "b32") for operand in site.sources)
    put, mode, lane = site.write("b32"), site.instruction.parts[2], site.machine.lane
    if mode not in ("bfly", "idx") or (clamp != 31).any():
        raise UnsupportedError(str(site.instruction))

    def shuffle(mask: Mask) -> None:
        _check_all_lanes(members, site.lanes(mask))
        source = (lane ^ selector if mode == "bfly" else selector) & 31
        put(value[lane // 32 * 32 + source], mask)

    return shuffle


def _reduce(site: Site) -> Effect:
    value, members = site.read(site.sources[0]), site.read(site.sources[1], "b32")
    operation, put = REDUCTIONS[site.instruction.parts[2]], site.write()

    def reduce(mask: Mask) -> None:
        _check_all_lanes(members, site.lanes(mask))
        result = operation.reduce(value.reshape(-1, 32), axis=1, dtype=value.dtype)
        put(result.repeat(32), mask)

    return reduce


def _matrices(site: Site) -> tuple[int, bool]:
    """Return how many matrices of 8 x 8 elements of 16 bits are moved, and whether turned."""
    _, _, _, shape, count, *turned, _, type = site.instruction.parts
    if (shape, type) != ("m8n8", "b16"):
        raise UnsupportedError(str(site.instruction))
    return int(count[1:]), turned == ["trans"]


def _load_matrices(site: Site) -> Effect:
    count, turned = _matrices(site)
    registers = [site.machine.registers.rows[operand] for operand in site.instruction.operands[0]]
    locate = site.machine.registers.address(site.sources[0])

    def load(mask: Mask) -> None:
        warps = _warps(site, mask)
        lanes = warps[:, : 8 * count].ravel()
        rows = site.machine.memory.load("shared", locate(lanes), lanes, 4, 4)
        elements = np.stack(rows, axis=1).view(np.uint16).reshape(len(warps), count, 8, 8)
        elements = elements.swapaxes(2, 3) if turned else elements
        pairs = np.stack([elements[..., ROW, COLUMN], elements[..., ROW, COLUMN + 1]], axis=-1)
        for place, register in enumerate(registers):
            register[warps] = pairs[:, place].copy().view(np.uint32)[..., 0]

    return load


def _store_matrices(site: Site) -> Effect:
    count, _ = _matrices(site)
    registers = [site.read(operand, "b32") for operand in site.sources[0]]
    locate = site.machine.registers.address(site.instruction.operands[0])

    def store(mask: Mask) -> None:
        warps = _warps(site, mask)
        lanes = warps[:, : 8 * count].ravel()
        elements = np.zeros((len(warps), count, 8, 8), np.uint16)
        for place, register in enumerate(registers):
            pairs = register[warps].view(np.uint16).reshape(len(warps), 32, 2)
            elements[:, place, ROW, COLUMN] = pairs[..., 0]
            elements[:, place, ROW, COLUMN + 1] = pairs[..., 1]
        words = elements.view(np.uint32).reshape(-1, 4)
        site.machine.memory.store("shared", locate(lanes), lanes, list(words.T))

    return store


def _numbers(words: np.ndarray, type: str) -> np.ndarray:
    """Return the two numbers that each word of 32 bits holds, float64 [..., 2]."""
    bits = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return (from_bf16(bits) if type == "bf16" else bits.view(np.float16)).astype(np.float64)


def _left_matrix(registers: list[np.ndarray], warps: np.ndarray, type: str) -> np.ndarray:
    """Return what each warp holds as four fragments, [warps, 16, 16]."""
    matrix = np.zeros((len(warps), 16, 16))
    for index, register in enumerate(registers):
        pairs = _numbers(register[warps], type)
        rows, columns = ROW + index % 2 * 8, COLUMN + index // 2 * 8
        matrix[:, rows, columns], matrix[:, rows, columns + 1] = pairs[..., 0], pairs[..., 1]
    return matrix


def _multiply(site: Site) -> Effect:
    """Multiply, in each warp, [16, 16] by [16, 8]."""
    *_, shape, _, _, result_type, left, right, sum_type = site.instruction.parts
    types = shape, result_type, sum_type
    if types != ("m16n8k16", "f32", "f32") or left != right or left not in HALVES:
        raise UnsupportedError(str(site.instruction))
    d, a, b, c = site.instruction.operands
    results, addends = ([site.read(operand, "f32") for operand in names] for names in (d, c))
    firsts, seconds = ([site.read(operand, "b32") for operand in names] for names in (a, b))

    def multiply(mask: Mask) -> None:
        warps = _warps(site, mask)
        second = np.zeros((len(warps), 16, 8))
        for index, register in enumerate(seconds):
            pairs = _numbers(register[warps], right)
            second[:, COLUMN + index * 8, ROW] = pairs[..., 0]
            second[:, COLUMN + index * 8 + 1, ROW] = pairs[..., 1]
        product = _left_matrix(firsts, warps, left) @ second
        sums = [
            product[:, ROW + index // 2 * 8, COLUMN + index % 2] + addends[index][warps]
            for index in range(4)
        ]
        for register, values in zip(results, sums, strict=True):
            register[warps] = values

    return multiply


class Products:
    """Products of groups of four warps as they were committed; each is done when waited for."""

    def __init__(self) -> None:
        self.pending: list[list[Callable[[], None]]] = [[]]  # The last is not committed.

    def wait(self, left: int) -> None:
        while len(self.pending) > left + 1:
            for product in self.pending.pop(0):
                product()


def _warpgroup(site: Site) -> Effect:
    machine, name = site.machine, site.instruction.parts[1]
    if name == "fence":
        return lambda mask: None
    if name == "commit_group":
        return lambda mask: machine.products.pending.append([])
    if name == "wait_group":
        left = int(site.instruction.operands[0])
        return lambda mask: machine.products.wait(left)
    if name != "mma_async":
        raise UnsupportedError(str(site.instruction))
    prepare = _warpgroup_product(site)

    def issue(mask: Mask) -> None:
        for group in site.lanes(mask).reshape(-1, 128):
            machine.products.pending[-1].append(prepare(group))

    return issue


def _warpgroup_product(site: Site) -> Callable[[np.ndarray], Callable[[], None]]:
    """Return what prepares a product, [64, 16] by [16, n], of a group's lanes."""
    shape, result_type, left, right = site.instruction.parts[4:]
    d, a, b, adds, *signs = site.instruction.operands
    is_turned = signs[-1] == "1"
    in_registers = isinstance(a, list)
    expected_signs = ["1", "1", *["0"] * (not in_registers), str(int(is_turned))]
    if (result_type, left) != ("f32", right) or left not in HALVES or signs != expected_signs:
        raise UnsupportedError(str(site.instruction))
    results = [site.read(operand, "f32") for operand in d]
    columns = int(shape.removeprefix("m64n").removesuffix("k16"))
    firsts = [site.read(operand, "b32") for operand in a] if in_registers else site.read(a, "b64")
    second, adds = site.read(b, "b64"), site.read(adds, "pred")

    def prepare(group: np.ndarray) -> Callable[[], None]:
        first_tile = None if in_registers else int(firsts[group[0]])
        second_tile, keeps = int(second[group[0]]), bool(adds[group[0]])
        return lambda: multiply(group.reshape(4, 32), first_tile, second_tile, keeps)

    def multiply(warps: np.ndarray, first_tile: int | None, second_tile: int, keeps: bool) -> None:
        if first_tile is None:
            left_matrix = _left_matrix(firsts, warps, left).reshape(64, 16)
        else:
            left_matrix = _numbers(_tile(site, first_tile, 64), left).reshape(64, 16)
        right_matrix = _numbers(_tile(site, second_tile, columns, is_turned), left).reshape(-1, 16)
        product = (left_matrix @ right_matrix.T).reshape(4, 16, columns)
        for index, register in enumerate(results):
            column = index // 4 * 8 + COLUMN + index % 2
            values = product[:, ROW + index // 2 % 2 * 8, column]
            register[warps] = values + register[warps] if keeps else values

    return prepare


def _tile(site: Site, descriptor: int, count: int, is_turned: bool = False) -> np.ndarray:
    """Return a tile in shared memory, uint32 [count, 8] of two elements each.

    It lies in rows of 32 to 128 bytes, whose pieces of 16 bytes are swizzled within eight rows.
    Elements along the 16 lie beside each other, or those along the count where it is turned.
    """
    shared = site.machine.memory.shared
    if not descriptor >> 62 or descriptor >> 49 & 7:
        raise UnsupportedError(f"a tile in shared memory as by {descriptor:#x}")
    width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    start, leading, stride = ((descriptor >> at & 0x3FFF) * 16 for at in (0, 16, 32))
    major, minor = np.arange(count)[:, None], np.arange(16)[None, :]
    if is_turned:
        per_row = width // 2
        offset = major // per_row * leading + major % per_row * 2
        offset = offset + minor // 8 * stride + minor % 8 * width
    else:
        offset = major // 8 * stride + major % 8 * width + minor * 2
    address = start + offset
    place = (address ^ (address >> 7 & (width // 16 - 1)) << 4) - SHARED_START
    if place.min() < 0 or place.max() + 2 > shared.size:
        raise AccessError("a tile lies outside of shared memory")
    shared.check_written(place, 2)
    return shared.views[2][place // 2].view(np.uint32)


COLLECTIVE: dict[str, Callable[[Site], Effect]] = {
    "bar.warp": _barrier,
    "shfl": _shuffle,
    "redux": _reduce,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
    "mma": _multiply,
    "wgmma": _warpgroup,
}
