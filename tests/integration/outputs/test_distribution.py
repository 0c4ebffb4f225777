"""Unseeded samples of a small vocabulary, against the target's own probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from tests.integration.engines import (
    GROWN,
    HOSTED,
    SMALL_OUROBOROS,
    TARGET,
    counter,
    engine,
    generate,
)

# No drafts are deeper than two tokens.
METHODS = {
    "grown": GROWN,
    "ouroboros": {**SMALL_OUROBOROS, "gamma": 2, "max_forwards": 2},
    "vLLM's trunk": {**HOSTED, "trunk": HOSTED["trunk"] | {"num_speculative_tokens": 2}},
}
# Digits follow digits, so that drafts are accepted within the small vocabulary of four.
PROMPT = "1234567890 = 1221334455"
NUM_SAMPLES = 3000
FALSE_ALARM_RATE = 1e-4


@pytest.fixture(scope="module")
def target() -> tuple[list[int], torch.Tensor]:
    """The four likeliest digits, and the probability of each text of three of them."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    prompt = tokenizer.encode(PROMPT)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    with torch.inference_mode():
        best = digits[model(torch.tensor([prompt])).logits[0, -1, digits].topk(4).indices]
        texts = torch.cat(
            (torch.tensor(prompt).expand(16, -1), torch.cartesian_prod(best, best)), 1
        )
        logits = model(texts).logits[:, -3:, best]
    first, second, third = logits.double().softmax(-1).view(4, 4, 3, 4).unbind(2)
    return best.tolist(), first[0, 0, :, None, None] * second[:, 0, :, None] * third


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_samples_fit_the_target_and_no_other_distribution(method, target):
    tokens, probabilities = target
    params = SamplingParams(temperature=1.0, max_tokens=3, allowed_token_ids=tokens)
    with engine(method, max_num_seqs=32) as llm:
        samples = generate(llm, [PROMPT] * NUM_SAMPLES, params)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    counts = torch.zeros(4, 4, 4)
    for ((*text,),) in samples:
        counts[*map(tokens.index, text)] += 1
    assert chance_of(counts, probabilities) > FALSE_ALARM_RATE
    wrong = probabilities**0.7
    assert chance_of(counts, wrong / wrong.sum()) < FALSE_ALARM_RATE


def chance_of(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of samples that fit as badly, by Pearson's test; cells that expect under 5 are merged."""
    count, statistic, degrees, expected, observed = counts.sum(), 0.0, -1, 0.0, 0.0
    for cell in probabilities.flatten().argsort():
        expected += float(count * probabilities.flatten()[cell])
        observed += float(counts.flatten()[cell])
        if expected >= 5:
            statistic += (observed - expected) ** 2 / expected
            degrees, expected, observed = degrees + 1, 0.0, 0.0
    half = torch.tensor([degrees, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))
