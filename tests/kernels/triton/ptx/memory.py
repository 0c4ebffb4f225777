"""Memory of a run: bounds, what was written, and races.

Two accesses race where one of them writes, the value changes, and nothing orders them: no barrier
between threads of a program, or two programs. Of each place only the last write and the last reads
are kept, so some races between programs go unseen. Threads see each other's writes at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.triton.ptx.faults import AccessError

SHARED_START = 1024  # so that address 0 is none
UNWRITTEN = 0xCD
SEVERAL = -2
# What is kept of an access; programs count from 1.
THREAD, WARP, PROGRAM, EPOCH, WARP_EPOCH, ATOMIC = range(6)


@dataclass
class Clock:
    """What orders accesses: the program, its barriers, and the barriers of warps by thread."""

    warp_epochs: np.ndarray
    program: int = 0
    epoch: int = 0


class Races:
    """The last accesses to the grains of a region; kept in pages, made when touched."""

    PAGE = 256

    def __init__(self, size: int, grain: int) -> None:
        self.grain, self.num_pages = grain, 0
        self.pages = np.full(size // grain // self.PAGE + 1, -1, np.int64)
        self.written = np.zeros((6, 0), np.int32)
        self.read = np.zeros((6, 0), np.int32)
        # Of grains that several threads wrote at once: the epoch, the last of these, and all.
        self.replicas: dict[int, tuple[int, int, set[int]]] = {}

    def note_reads(
        self, offsets: np.ndarray, size: int, lanes: np.ndarray, clock: Clock
    ) -> str | None:
        """Keep reads; return a race with what was written before, in words."""
        grains = self._grains(offsets, size)
        access = self._access(grains, lanes, clock)
        race = self._race("reads what was written", self.written, grains, access)
        records = self.read[:, grains]
        is_first = records[EPOCH] != clock.epoch
        for row in (THREAD, WARP):
            owners = np.where(is_first | (records[row] == access[row]), access[row], SEVERAL)
            self.read[row, grains] = owners
            # Of lanes that read one grain at once the last one stays.
            clash = self.read[row, grains] != owners
            self.read[row, grains[clash]] = SEVERAL
        self.read[PROGRAM:, grains] = access[PROGRAM:]
        return race

    def note_writes(
        self,
        offsets: np.ndarray,
        size: int,
        lanes: np.ndarray,
        clock: Clock,
        changes: np.ndarray,
        *,
        atomic: bool = False,
    ) -> str | None:
        """Keep writes; return a race with what was written or read before, in words.

        Atomic operations do not race with each other.
        """
        grains = self._grains(offsets, size)
        access = self._access(grains, lanes, clock)
        access[ATOMIC] = atomic
        # What leaves a value as it is harms nobody.
        where = {"grains": grains, "access": access, "changes": changes[:, None]}
        race = self._race("writes over what was written", self.written, **where)
        race = self._race("writes over what was read", self.read, **where) or race
        self.written[:, grains] = access
        replicas = self.written[THREAD, grains] != access[THREAD]
        if replicas.any() and not atomic:
            threads: dict[int, set[int]] = {}
            for grain, thread in zip(grains.flat, access[THREAD].flat, strict=True):
                threads.setdefault(int(grain), set()).add(int(thread))
            for grain in set(grains[replicas].tolist()):
                last = int(self.written[THREAD, grain])
                self.replicas[grain] = clock.epoch, last, threads[grain]
        return race

    def _grains(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return the columns of the grains that each lane touches, [lanes, grains]."""
        numbers = offsets[:, None] // self.grain + np.arange(max(1, size // self.grain))
        page_numbers = numbers // self.PAGE
        places = self.pages[page_numbers]
        if (places < 0).any():
            fresh_pages = np.unique(page_numbers[places < 0])
            self.pages[fresh_pages] = self.num_pages + np.arange(len(fresh_pages))
            self.num_pages += len(fresh_pages)
            missing = self.num_pages * self.PAGE - self.written.shape[1]
            if missing > 0:
                records = np.zeros((6, 2 * missing), np.int32)
                self.written = np.concatenate((self.written, records), axis=1)
                self.read = np.concatenate((self.read, records), axis=1)
            places = self.pages[page_numbers]
        return places * self.PAGE + numbers % self.PAGE

    def _access(self, grains: np.ndarray, lanes: np.ndarray, clock: Clock) -> np.ndarray:
        """Return what is to be kept, [6, lanes, grains]."""
        access = np.zeros((6, *grains.shape), np.int32)
        access[THREAD] = lanes[:, None]
        access[WARP] = lanes[:, None] // 32
        access[PROGRAM], access[EPOCH] = clock.program, clock.epoch
        access[WARP_EPOCH] = clock.warp_epochs[lanes][:, None]
        return access

    def _race(
        self,
        text: str,
        table: np.ndarray,
        grains: np.ndarray,
        access: np.ndarray,
        changes: np.ndarray | bool = True,
    ) -> str | None:
        """Return the worst race with accesses that are kept, in words."""
        program = table[PROGRAM, grains]
        is_foreign = (program > 0) & (program != access[PROGRAM])
        if not (is_foreign | (table[EPOCH, grains] == access[EPOCH])).any():
            return None
        records = table[:, grains]
        is_harmful = changes & ~(records[ATOMIC] & access[ATOMIC]).astype(bool)
        is_foreign &= is_harmful
        if is_foreign.any():
            thread = access[THREAD][is_foreign][0]
            return f"race between programs on {{}}, thread {thread} {text}"
        is_race = (records[EPOCH] == access[EPOCH]) & (records[THREAD] != access[THREAD])
        is_same_warp = records[WARP] == access[WARP]
        is_race &= ~is_same_warp | (records[WARP_EPOCH] == access[WARP_EPOCH])
        is_race &= is_harmful
        # Those between warps first.
        places = np.argwhere(is_race)
        for row, column in places[np.argsort(is_same_warp[is_race], kind="stable")]:
            thread = int(access[THREAD, row, column])
            peer = int(records[THREAD, row, column])
            epoch, writer, writers = self.replicas.get(int(grains[row, column]), (0, 0, set()))
            is_own = (epoch, writer) == (access[EPOCH, row, column], peer) and thread in writers
            if table is self.written and is_own:
                continue
            kind = "unordered within a warp" if is_same_warp[row, column] else "race between warps"
            peer_text = "several threads" if peer == SEVERAL else f"thread {peer}"
            return f"{kind} on {{}}, thread {thread} {text} by {peer_text}"
        return None


class Region:
    """A piece of memory at an address that is divisible by 16, changed in place.

    `grain` are the bytes of an element, `parts` those that may be touched, from one to another.
    """

    def __init__(self, name: str, start: int, content: np.ndarray, grain: int) -> None:
        assert start % 16 == 0
        self.name, self.start, self.size, self.bytes = name, start, len(content), content
        self.views = {
            size: content[: len(content) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)
        }
        self.parts: list[tuple[int, int]] = []
        self.races = Races(self.size, grain)

    def check(self, offsets: np.ndarray, size: int) -> None:
        is_part = np.zeros(len(offsets), bool)
        for first, end in self.parts:
            is_part |= (offsets >= first) & (offsets + size <= end)
        if not is_part.all():
            strays = offsets[~is_part]
            raise AccessError(
                f"{size} bytes at byte {strays[0]} of {self.name} are in its storage, but of no "
                f"tensor that was given; {len(strays)} lanes"
            )


class SharedMemory(Region):
    """The shared memory of a program, in which nothing is written at first."""

    def __init__(self, size: int, grain: int) -> None:
        super().__init__("shared memory", SHARED_START, np.full(size, UNWRITTEN, np.uint8), grain)
        self.parts = [(0, size)]
        self.is_written = np.zeros(size, bool)

    def check_written(self, offsets: np.ndarray, size: int) -> None:
        for byte in (0, size - 1):
            is_written = self.is_written[offsets + byte]
            if not is_written.all():
                strays = offsets[~is_written]
                raise AccessError(
                    f"shared memory at byte {strays[0]} was never written ({len(strays)} lanes)"
                )


@dataclass
class Memory:
    """What a run can touch, and what was found in it.

    Attributes:
        tensors: of global memory.
        shared: of the program that runs.
        findings: what a GPU would go on with, in words, and how often.
        describe: says which instruction runs.

    """

    tensors: list[Region]
    shared: SharedMemory
    clock: Clock
    describe: Callable[[], str]
    findings: Counter[str] = field(default_factory=Counter)

    def load(
        self, space: str, addresses: np.ndarray, lanes: np.ndarray, size: int, count: int
    ) -> list[np.ndarray]:
        """Load `count` words of `size` bytes from each address; return [lanes] of each."""
        values = [np.zeros(len(lanes), f"u{size}") for _ in range(count)]
        for region, which, offsets in self._touched(space, addresses, size * count):
            if region is self.shared:
                region.check_written(offsets, size * count)
            race = region.races.note_reads(offsets, size * count, lanes[which], self.clock)
            self._report(region, race)
            for place, words in enumerate(values):
                words[which] = region.views[size][offsets // size + place]
        return values

    def store(
        self, space: str, addresses: np.ndarray, lanes: np.ndarray, values: list[np.ndarray]
    ) -> None:
        """Store words side by side at each address; `values` has [lanes] of each."""
        size = values[0].itemsize
        total = size * len(values)
        for region, which, offsets in self._touched(space, addresses, total):
            view, index = region.views[size], offsets // size
            changes = np.zeros(len(index), bool)
            for place, words in enumerate(values):
                changes |= view[index + place] != words[which]
            access = (offsets, total, lanes[which], self.clock, changes)
            self._report(region, region.races.note_writes(*access))
            for place, words in enumerate(values):
                view[index + place] = words[which]
                if (view[index + place] != words[which]).any():
                    self._report(region, "threads write different values at once to {}")
            if region is self.shared:
                for byte in range(total):
                    region.is_written[offsets + byte] = True

    def update(
        self,
        addresses: np.ndarray,
        lanes: np.ndarray,
        operation: Callable[[Any, Any], Any],
        values: np.ndarray,
    ) -> np.ndarray:
        """Change global memory atomically, lane after lane; return what was there, [lanes]."""
        results, size = np.zeros_like(values), values.itemsize
        for region, which, offsets in self._touched("global", addresses, size):
            view, index = region.views[size].view(values.dtype), offsets // size
            contents = view[index]
            for lane, place in zip(np.arange(len(lanes))[which], index, strict=True):
                results[lane] = view[place]
                view[place] = operation(results[lane], values[lane])
            access = (offsets, size, lanes[which], self.clock, contents != view[index])
            self._report(region, region.races.note_writes(*access, atomic=True))
        return results

    def _report(self, region: Region, text: str | None) -> None:
        if text:
            self.findings[f"{text.format(region.name)}: {self.describe()}"] += 1

    def _touched(
        self, space: str, addresses: np.ndarray, size: int
    ) -> list[tuple[Region, Any, np.ndarray]]:
        """Return regions, which of the addresses lie in each, and their byte offsets in it.

        Raises:
            AccessError: addresses that are not aligned, or in no tensor.

        """
        if not len(addresses):
            return []
        if (addresses % np.uint64(size)).any():
            raise AccessError(f"{size} bytes at {int(addresses.max()):#x} are not aligned")
        parts = []
        for region, which in self._regions(space, addresses, size):
            offsets = (addresses[which] - np.uint64(region.start)).astype(np.int64)
            region.check(offsets, size)
            parts.append((region, which, offsets))
        return parts

    def _regions(self, space: str, addresses: np.ndarray, size: int) -> list[tuple[Region, Any]]:
        regions = [self.shared] if space == "shared" else self.tensors
        first, last = int(addresses.min()), int(addresses.max())
        for region in regions:
            if region.start <= first and last + size <= region.start + region.size:
                return [(region, slice(None))]
        parts, is_lost = [], np.ones(len(addresses), bool)
        for region in regions:
            end = max(region.start, region.start + region.size - size + 1)
            is_inside = (addresses >= np.uint64(region.start)) & (addresses < np.uint64(end))
            if is_inside.any():
                parts.append((region, np.flatnonzero(is_inside)))
                is_lost &= ~is_inside
        if is_lost.any():
            address = int(addresses[is_lost][0])
            raise AccessError(
                f"{size} bytes at {address:#x} lie in no tensor ({_nearest(regions, address)}); "
                f"{is_lost.sum()} of {len(addresses)} lanes"
            )
        return parts


def _nearest(regions: list[Region], address: int) -> str:
    def distance(region: Region) -> int:
        return min(abs(address - region.start), abs(address - region.start - region.size))

    nearest = min(regions, key=distance)
    return f"nearest {nearest.name}, {address - nearest.start:+d} of {nearest.size} bytes"
