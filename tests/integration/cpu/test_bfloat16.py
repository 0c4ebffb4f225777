"""bfloat16: rows of other batch shapes round differently; outputs part at near-ties alone."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.integration.engines import (
    TARGET,
    TOKEN_RECYCLING,
    counter,
    engine,
    generate,
    read_prompts,
)
from tests.integration.models.random_models import deepseek

PROMPTS = read_prompts(12)
# A price that does not go by how busy this machine is.
METHOD = {**TOKEN_RECYCLING, "row_cost": 0.02}
# Logits here are of order ten, bfloat16 has 8 bits: a few units in the last place.
NEAR_TIE_NATS = 0.2


@pytest.mark.parametrize("make", [None, deepseek], ids=["the target", "MLA"])
def test_outputs_part_only_where_the_two_best_tokens_are_close(make, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
    model = TARGET if make is None else make(tmp_path / "model")
    with engine(model=model, dtype="bfloat16") as llm:
        expected = [r.outputs[0] for r in llm.generate(PROMPTS, params, use_tqdm=False)]
    with engine(METHOD, model=model, dtype="bfloat16") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=48)
        got = [ids for (ids,) in generate(llm, PROMPTS, greedy)]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    num_equal = 0
    for plain, ours in zip(expected, got, strict=True):
        if tuple(plain.token_ids) == ours:
            num_equal += 1
            continue
        parted = [a != b for a, b in zip(plain.token_ids, ours, strict=False)].index(True)
        logprobs = plain.logprobs[parted]
        best = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
        assert best[0] - best[1] < NEAR_TIE_NATS
        assert ours[parted] in logprobs
    assert num_equal  # how many depends on the machine: most with AVX-512, of MLA few without it
