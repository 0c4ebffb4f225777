"""Models whose steps are computed, in the tests of the core."""

from __future__ import annotations

from vllm_recycle.core.roofline import ModelCosts, Weights


def in_16_bits(count: float) -> Weights:
    return Weights(count, 2 * count)


LLAMA_8B = ModelCosts(
    layers=32,
    dense=in_16_bits(6.98e9),
    head=in_16_bits(128256 * 4096),
    kv_bytes=32 * 2 * 8 * 128 * 2,
    attention_flops=32 * 4 * 32 * 128,
    logits_bytes=128256 * 12,
)
QWEN_30B_A3B = ModelCosts(
    layers=48,
    dense=in_16_bits(48 * 2048 * (4096 + 2 * 512 + 4096)),
    head=in_16_bits(151936 * 2048),
    kv_bytes=48 * 2 * 4 * 128 * 2,
    attention_flops=48 * 4 * 32 * 128,
    logits_bytes=151936 * 12,
    expert=in_16_bits(48 * 3 * 2048 * 768),
    num_experts=128,
    experts_per_row=8,
)
# A draft model beside LLAMA_8B.
LLAMA_1B = ModelCosts(
    layers=16,
    dense=in_16_bits(0.973e9),
    head=in_16_bits(128256 * 2048),
    kv_bytes=16 * 2 * 8 * 64 * 2,
    attention_flops=16 * 4 * 32 * 64,
    logits_bytes=128256 * 4,
)
