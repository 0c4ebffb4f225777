"""How many nodes a step verifies, and of which kind its drafts are: the only place that decides.

The best step gives the most expected tokens by its seconds. A chooser says what the next step may
be; what it costs is from the curve, what it gives from the worth of its nodes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from vllm_recycle.core.curve import TRUNKS, Curve, Load
from vllm_recycle.core.explore import (
    DOUBTFUL,
    FIRST_GAIN,
    FIRST_STEPS,
    FORGET,
    FORGET_OTHER,
    MOST_LONGER,
    PLAIN,
    PROMISED,
    STALL,
    Account,
    Arm,
    Explorer,
    Mean,
    Trust,
)

logger = logging.getLogger("vllm.recycle")


class Price(NamedTuple):
    """What drafts of a kind cost, and how far they are trusted.

    Attributes:
        seconds: float64 [rows + 1], of a step by the rows of all requests; infinite if unknown.
        trust: accepted tokens for an expected one.

    """

    seconds: torch.Tensor
    trust: float = 1.0


def choose(
    worths: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    trust: float = 1.0,
    num_reqs: int | None = None,
    widths: Sequence[int] = (),
) -> tuple[list[int], float]:
    """How many nodes of each draft a step verifies, for the most expected tokens by its time.

    Each draft is cut to a prefix. A prefix grows by blocks: the next nodes with the highest worth
    on average, so that a node which is worth little does not hide a better one behind it. Blocks of
    all drafts are taken, the best first, as long as the rate of the step rises. Where no node is
    worth more than the one before it, as in a grown tree, no other choice is better.

    Args:
        worths: by draft and node, the chance that it is accepted; 0 for none.
        seconds: by rows of all requests, from 0; infinite if unknown.
        trust: see `Price`.
        num_reqs: requests of the step, if there are others than those of the drafts.
        widths: rows that each node stands for, if not one. So a few sizes, which all drafts of a
            batch share, are the nodes of one draft.

    Returns:
        Nodes by draft; of equally good choices the one with the fewest nodes, of equal blocks those
        of the first draft. And the rate of the step, expected tokens a second.

    """
    blocks = [
        (-worth / rows, b, size, rows, worth)
        for b, row in enumerate(worths)
        for worth, rows, size in _blocks(row, widths or [1] * len(row))
    ]
    blocks.sort(key=itemgetter(0, 1))
    rows, max_rows = len(worths) if num_reqs is None else num_reqs, len(seconds) - 1
    total = float(rows)
    best_rate, num_taken = total / seconds[min(rows, max_rows)], 0
    for num_blocks, (*_, block_rows, worth) in enumerate(blocks, start=1):
        total, rows = total + trust * worth, rows + block_rows
        if rows > max_rows:
            break
        if total / seconds[rows] > best_rate:
            best_rate, num_taken = total / seconds[rows], num_blocks
    counts = [0] * len(worths)
    for _, b, size, *_ in blocks[:num_taken]:
        counts[b] += size
    return counts, best_rate


def _blocks(worths: Sequence[float], widths: Sequence[int]) -> list[tuple[float, int, int]]:
    """Worth, rows and size of blocks of nodes, none with a higher average than the one before."""
    blocks: list[tuple[float, int, int]] = []
    for node, width in zip(worths, widths, strict=True):
        worth, rows, size = node, width, 1
        while blocks and blocks[-1][0] * rows < worth * blocks[-1][1]:
            last_worth, last_rows, last_size = blocks.pop()
            worth, rows, size = last_worth + worth, last_rows + rows, last_size + size
        blocks.append((worth, rows, size))
    return blocks


def least_slopes(seconds: Sequence[float]) -> list[float]:
    """For each number of rows, the least slope to any larger one; infinite for the largest.

    It is the slope to the next corner of the lower hull of all that come behind.
    """
    hull, slopes = [len(seconds) - 1], [math.inf] * len(seconds)

    def slope(start_row: int, end_row: int) -> float:
        return (seconds[end_row] - seconds[start_row]) / (end_row - start_row)

    for row in range(len(seconds) - 2, -1, -1):
        while len(hull) > 1 and slope(row, hull[-1]) >= slope(hull[-1], hull[-2]):
            hull.pop()
        slopes[row] = slope(row, hull[-1])
        hull.append(row)
    return slopes


class Chooser:
    """Decides step by step, and learns what steps took and gave.

    Args:
        curve: of the engine.
        most_rows: by kind, the most rows per request.
        ahead: steps that are decided before one is known.

    Attributes:
        curve: of the engine.
        account: of what may be lost.
        explorer: which steps are looks.
        trusts: by kind of drafts.
        best: the kind and the rows per drafting request of the last step that was no look.

    """

    def __init__(self, curve: Curve, most_rows: Mapping[str, int], *, ahead: int = 0) -> None:
        self.curve, self.most_rows = curve, most_rows
        self.account = Account(ahead=ahead)
        self.explorer = Explorer(curve.kinds, self.account)
        self.trusts = {kind: Trust() for kind in curve.kinds}
        self.best = (curve.kinds[0], 1)
        # By cell: expected tokens per request that steps along trunks give in a plain step's time.
        self._trunk_rates: dict[Hashable, Mean] = {}
        self._slowdown = 1.0  # the last step with drafts, in parts of its expected seconds

    def look(self, load: Load) -> Arm | None:
        """The arm of the next step if it is a look; None if the step is to be the best."""
        return self.explorer.look(self.curve.cell(load), lambda: self._arms(load))

    def _arms(self, load: Load) -> dict[Arm, float]:
        """Drafts of each kind, about as large as the best or twice as large, and their cost."""
        plain, arms = self.curve.plain(load), {}
        for kind in self.curve.kinds:
            for size in (self.best[1], 2 * self.best[1]):
                size = min(size, self.most_rows[kind])
                rows = load.requests + (size - 1) * (load.drafting or load.requests)
                [seconds] = self.curve.at(kind, load, (rows,))
                if size > 1 and math.isfinite(seconds):
                    arms[arm_of(kind, size)] = seconds / plain
        return arms

    def most_seconds(self, load: Load) -> float:
        """The longest step that the account affords, even if nothing is accepted."""
        return self.account.most * self.curve.plain(load)

    def price(self, kind: str, seconds: torch.Tensor, load: Load) -> Price:
        """The price of drafts of a kind, up to the rows that the account affords.

        `seconds`, float64 [rows + 1], are those of a step, never falling.
        """
        max_seconds = torch.tensor(self.most_seconds(load), dtype=torch.float64)
        rows = max(1 + load.requests, int(torch.searchsorted(seconds, max_seconds, right=True)))
        return Price(seconds[:rows], self.trusts[kind].factor)

    def choose_trunks(
        self, load: Load, rate: float, *, num_left: np.ndarray, reading: np.ndarray, is_look: bool
    ) -> np.ndarray:
        """For which requests of a step a draft model drafts a trunk, bool [batch].

        Where the account does not afford all, those with the most to read are left out.

        Args:
            load: of the step.
            rate: expected tokens a second of the step without trunks.
            num_left: float64 [batch], tokens that each answer is expected to get still; 0 where
                nothing is drafted.
            reading: float64 [batch], seconds in which the model reads what it lacks of each text.
            is_look: whether the step is a look at trunks.

        """
        gain = num_left * (1 / rate - 1 / self.trunk_rate(load, rate))
        chosen = (num_left > 0) & (is_look | (gain > reading))
        [seconds] = self.curve.at(TRUNKS, load, (load.requests,))
        order = np.argsort(reading, kind="stable")
        costs = seconds + np.cumsum((reading * chosen)[order])
        chosen[order[costs > self.most_seconds(load)]] = False
        return chosen

    def trunk_rate(self, load: Load, rate: float) -> float:
        """Expected tokens a second of a step along trunks, by that of the step without."""
        scale = self.curve.plain(load) / load.requests
        return self._mean_trunk_rate(load, rate * scale).value / scale

    def record_trunks(self, load: Load, rate: float, trunk_rate: float) -> None:
        """Take in tokens a second that a step promised along trunks, and what it did without."""
        scale = self.curve.plain(load) / load.requests
        mean = self._mean_trunk_rate(load, rate * scale)
        self._trunk_rates[self.curve.cell(load)] = mean.with_sample(trunk_rate * scale)

    def _mean_trunk_rate(self, load: Load, rate: float) -> Mean:
        """That of a cell, or what it begins with; `rate` without trunks is on the same scale."""
        first_rate = Mean(FIRST_GAIN * rate, FIRST_STEPS)
        return self._trunk_rates.get(self.curve.cell(load), first_rate)

    def choose_size(
        self,
        load: Load,
        worths: Mapping[str, np.ndarray],
        sizes: Sequence[int],
        *,
        is_known: bool = True,
    ) -> tuple[str, int]:
        """The kind and the nodes of the drafts of a step, where all have one of a few sizes.

        Of steps whose seconds are not known it is what was best, if the account affords that.

        Args:
            load: of the step.
            worths: by kind, of each node of a request's draft, float64 [nodes]; at least one kind.
            sizes: nodes that drafts may have, ascending from 0.
            is_known: whether seconds of such a step are known.

        """
        arm = self.look(load) if is_known else self.best
        if arm == PLAIN:
            return self.best[0], 0
        drafting, limit = load.drafting or load.requests, self.most_seconds(load)
        rows = tuple(load.requests + drafting * size for size in sizes)
        if arm is not None:
            kind, max_rows = arm
            pairs = zip(sizes, self.curve.at(kind, load, rows), strict=True)
            fitting_sizes = [
                size
                for size, seconds in pairs
                if 0 < size < max_rows
                and (seconds <= limit or (not is_known and math.isinf(seconds)))
            ]
            return kind, max(fitting_sizes, default=sizes[:2][-1] if is_known else 0)
        widths, offers = [end - start for start, end in itertools.pairwise(rows)], []
        for kind, worth in worths.items():
            gains = [0.0, *(drafting * worth.cumsum()).tolist()]
            deltas = [gains[end] - gains[start] for start, end in itertools.pairwise(sizes)]
            seconds = [math.inf] * (rows[-1] + 1)
            for num_rows, step_seconds in zip(rows, self.curve.at(kind, load, rows), strict=True):
                if step_seconds <= limit:
                    seconds[num_rows] = step_seconds
            trust, num_reqs = self.trusts[kind].factor, load.requests
            [index], rate = choose([deltas], seconds, trust=trust, num_reqs=num_reqs, widths=widths)
            offers.append((rate, kind, sizes[index]))
        _, kind, size = max(offers, key=itemgetter(0))
        self.best = kind, 1 + size
        return kind, size

    def served(
        self,
        kind: str | None,
        load: Load,
        rows: int,
        *,
        tokens: int,
        seconds: float | None,
        reading: float = 0.0,
        expected: float | None = None,
    ) -> None:
        """Take in a step.

        Args:
            kind: of its drafts, of which there may be none along trunks; else None where there were
                none, or they may be of any kind.
            load: of the requests that were sampled for.
            rows: of these requests.
            tokens: that they got.
            seconds: that the step took; None where it had prompts, or others disturbed it.
            reading: seconds of drafting in which a draft model read texts; `seconds` is None then.
            expected: draft tokens that should have been accepted; None if that is unknown.

        """
        plain, account = self.curve.plain(load), self.account
        kinds = self.curve.kinds_of(kind)
        [prediction] = self.curve.at(kinds[0], load, (rows,))
        if not (math.isfinite(prediction) and math.isfinite(plain)):
            return
        is_plain = rows == load.requests and kind != TRUNKS
        if is_plain:
            account.plain()
        else:
            slowdown = 1.0 if seconds is None else seconds / prediction
            # One step that is far longer than the one before it was disturbed.
            step_seconds = prediction * min(slowdown, max(STALL, self._slowdown))
            self._slowdown = min(slowdown, MOST_LONGER)
            account.drafted(tokens / load.requests, (step_seconds + reading) / plain)
        self._trust(kinds if rows > load.requests else (), load, tokens, expected)
        cell = self.curve.cell(load)
        size = 1 + (rows - load.requests) / (load.drafting or load.requests)
        arms = [PLAIN if is_plain else arm_of(draft_kind, size) for draft_kind in kinds]
        is_look, median = self.explorer.served(cell, arms, seconds=seconds, expected=prediction)
        if median is not None:
            self.curve.set_plain(load, median)
        elif seconds is not None and (rows > load.requests or (is_plain and not is_look)):
            self.curve.serve(kind, load, rows, seconds, is_look=is_look)

    def _trust(self, kinds: Sequence[str], load: Load, tokens: int, expected: float | None) -> None:
        """Take in whether drafts of these kinds kept their promise; none for a plain step."""
        doubtful_kinds = []
        for kind, trust in self.trusts.items():
            if kind not in kinds:
                trust.forget(FORGET_OTHER if kinds else FORGET)
            elif expected is not None:
                accepted = tokens / load.requests - 1.0
                if trust.count(accepted, expected / load.requests):
                    doubtful_kinds.append(kind)
        if doubtful_kinds:
            logger.warning(
                "drafts (%s): of %d tokens per request that were expected to be accepted, less "
                "than %g %% were; such drafts are smaller now",
                ", ".join(doubtful_kinds),
                PROMISED,
                100 * DOUBTFUL,
            )


def arm_of(kind: str, rows: float) -> Arm:
    """The arm of steps with so many rows per request."""
    place = round(math.log2(rows))
    return kind, 2**place
