"""A mixture of experts: output is vLLM's own, token for token."""

from __future__ import annotations

from derived_models import mixtral
from engines import GROWN, TARGET, counter, engine, generate, read_prompts
from vllm import SamplingParams

PROMPTS = read_prompts(6, max_words=40)
PARAMS = [
    SamplingParams(max_tokens=32, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
    for index in range(len(PROMPTS))
]


def test_output_equals_vllm(tmp_path):
    model = mixtral(tmp_path / "model")
    with engine(model=model) as llm:
        expected = generate(llm, PROMPTS, PARAMS)
    with engine(GROWN, model=model) as llm:
        assert generate(llm, PROMPTS, PARAMS) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    with engine(model=TARGET) as llm:
        assert generate(llm, PROMPTS, PARAMS) != expected
