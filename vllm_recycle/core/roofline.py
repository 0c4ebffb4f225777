"""The time of a step by arithmetic: what it reads over bandwidth, or what it computes over FLOPS.

Nothing is measured here. Where a step was measured `step_seconds` takes over; this is for the rest.
The three parts of a step come one after another, so each is bound by one of the two on its own: the
layers' matrix products, attention to the context, and the logits with what is sampled from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What kernels reach of a device's peaks.
OF_BANDWIDTH, OF_FLOPS, OF_ATTENTION_FLOPS = 0.8, 0.65, 0.35
# Launches of a layer, and what waits for each other within it.
LAYER_SECONDS = 10e-6


@dataclass(frozen=True, slots=True)
class Device:
    """The peaks of a device.

    Attributes:
        flops: a second, of dense matrix products in 16 bits.
        bandwidth: bytes a second, of its memory.

    """

    flops: float
    bandwidth: float


# By what their names have in them; of several the first. Vendors' figures, without sparsity.
DEVICES = {
    r"\bMIG\b": None,
    r"\bA100.*40GB": Device(312e12, 1.555e12),
    r"\bA[18]00.*PCI": Device(312e12, 1.935e12),
    r"\bA[18]00": Device(312e12, 2.039e12),
    r"\bA10\b": Device(125e12, 0.6e12),
    r"\bA30\b": Device(165e12, 0.933e12),
    r"\bL4\b": Device(121e12, 0.3e12),
    r"\bL40S\b": Device(362e12, 0.864e12),
    r"\bH100 NVL": Device(835e12, 3.9e12),
    r"\bH100 PCI": Device(756e12, 2.0e12),
    r"\bH[18]00": Device(989e12, 3.35e12),
    r"\bH200 NVL": Device(835e12, 4.8e12),
    r"\bH200": Device(989e12, 4.8e12),
    r"\bH20\b": Device(148e12, 4.0e12),
    r"B200": Device(2250e12, 7.7e12),
    r"RTX 4090": Device(165e12, 1.008e12),
}


def device_of(name: str) -> Device | None:
    """The device of a name, as CUDA gives it; None where its peaks are not known."""
    return next((known for part, known in DEVICES.items() if re.search(part, name)), None)


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices that a step reads whole, however few its rows.

    Attributes:
        count: numbers in them, each multiplied once for a row.
        num_bytes: what they take, scales and all.

    """

    count: float
    num_bytes: float

    def seconds(self, device: Device, rows: float) -> float:
        """For so many rows."""
        reading = self.num_bytes / (device.bandwidth * OF_BANDWIDTH)
        return max(reading, 2 * self.count * rows / (device.flops * OF_FLOPS))


NO_WEIGHTS = Weights(0, 0)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model, or a rank's part of it, has to read and compute.

    Attributes:
        layers: how many.
        dense: of all layers, what every row meets.
        head: what makes the logits.
        expert: one expert, in all layers together.
        num_experts: of a layer; 0 where there are none.
        experts_per_row: how many of them a row meets.
        kv_bytes: keys and values of a token, in all layers.
        attention_flops: of a row and a token of its context, in all layers.
        logits_bytes: read and written for a row by what samples from it and learns from it.
        windows: of the layers that have a sliding one, its tokens and how many have it.

    """

    layers: int
    dense: Weights
    head: Weights
    kv_bytes: float
    attention_flops: float
    logits_bytes: float
    expert: Weights = NO_WEIGHTS
    num_experts: int = 0
    experts_per_row: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def layers_seconds(self, device: Device, rows: float) -> float:
        """The layers, but for attention to the context."""
        seconds = self.layers * LAYER_SECONDS + self.dense.seconds(device, rows)
        if self.num_experts:
            touched = touched_experts(self.num_experts, self.experts_per_row, rows)
            # Of those that are touched, each has its share of the rows.
            share = rows * self.experts_per_row / touched
            seconds += touched * self.expert.seconds(device, share)
        return seconds

    def attention_seconds(
        self, device: Device, *, requests: int, rows: float, context: float
    ) -> float:
        """Attention of so many rows in all, to the contexts of their requests."""
        seen = self.mean_seen(context)
        reading = requests * seen * self.kv_bytes / (device.bandwidth * OF_BANDWIDTH)
        computing = rows * seen * self.attention_flops / (device.flops * OF_ATTENTION_FLOPS)
        return max(reading, computing)

    def mean_seen(self, context: float) -> float:
        """Tokens of a context that a layer sees, on average over the layers."""
        hidden = sum(count * max(0.0, context - window) for window, count in self.windows)
        return context - hidden / self.layers

    def logits_seconds(self, device: Device, rows: float) -> float:
        """The logits of so many rows, and what is done with them."""
        reading = rows * self.logits_bytes / (device.bandwidth * OF_BANDWIDTH)
        return self.head.seconds(device, rows) + reading


def touched_experts(num_experts: int, experts_per_row: int, rows: float) -> float:
    """Experts of a layer that some row meets, where each row meets any of them."""
    return num_experts * (1 - (1 - experts_per_row / num_experts) ** rows)
