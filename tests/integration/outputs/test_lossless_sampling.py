"""Every sampling parameter gives what vLLM gives without us, and free sampling its distribution."""

from __future__ import annotations

from collections import Counter

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
    read_prompts,
)

# vLLM 0.33 wants room for the whole draft in a step of 32 tokens.
METHODS = {"grown": GROWN, "ouroboros": SMALL_OUROBOROS}
METHODS["vLLM's trunk"] = {**HOSTED, "max_nodes": 24}
PROMPTS = read_prompts(18, max_words=40)
# Logits of tree rows and of single rows differ in the last bits of float32 (other GEMM shapes).
LOGPROB_TOLERANCE = 2e-4

SEEDED = {"temperature": 0.8, "seed": 7, "max_tokens": 32}
GREEDY = {"temperature": 0.0, "max_tokens": 32}
PARAMETERS = {
    "seed": SEEDED,
    "seed, top_k, top_p": {**SEEDED, "top_k": 20, "top_p": 0.9},
    "seed, min_p": {**SEEDED, "min_p": 0.1},
    "seed, all penalties": {
        **SEEDED,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
    },
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.2},
    "frequency penalty": {**GREEDY, "frequency_penalty": 0.7},
    "logit bias": {**GREEDY, "logit_bias": {300: 4.0, 13: -8.0, 199: 2.5}},
    "bad words": {**GREEDY, "bad_words": ["the", "return", "is"]},
    "allowed tokens": {**GREEDY, "allowed_token_ids": list(range(3, 1500))},
    "min tokens": {**GREEDY, "min_tokens": 24, "stop_token_ids": [300, 13, 199]},
    "stop tokens": {**GREEDY, "stop_token_ids": [300, 13, 199]},
    "stop strings": {**GREEDY, "stop": [" the", "\n\n", "return"]},
    "stop string, seed": {**SEEDED, "stop": [" the", "="], "include_stop_str_in_output": True},
    "logprobs": {**GREEDY, "logprobs": 5},
    "logprobs, seed": {**SEEDED, "logprobs": 3, "prompt_logprobs": 2},
    "n": {**SEEDED, "n": 3},
    "one token": {**GREEDY, "max_tokens": 1},
    "ignore eos": {**GREEDY, "ignore_eos": True, "max_tokens": 64},
}


def params_of_each_prompt() -> list[SamplingParams]:
    return [SamplingParams(**kwargs) for kwargs in PARAMETERS.values()]


@pytest.fixture(scope="module")
def expected():
    with engine() as llm:
        return llm.generate(PROMPTS, params_of_each_prompt(), use_tqdm=False)


@pytest.fixture(scope="module", params=METHODS)
def got(request):
    with engine(METHODS[request.param]) as llm:
        # The second pass has a warm matrix or pool, hence deep accepted paths.
        llm.generate(PROMPTS, params_of_each_prompt(), use_tqdm=False)
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
        results = llm.generate(PROMPTS, params_of_each_prompt(), use_tqdm=False)
        assert counter(llm, "spec_decode_num_accepted_tokens") > accepted
        return results


@pytest.mark.versions
@pytest.mark.parametrize("index", range(len(PARAMETERS)), ids=list(PARAMETERS))
def test_all_parameters_mixed_in_one_batch(expected, got, index):
    for with_us, without_us in zip(got[index].outputs, expected[index].outputs, strict=True):
        assert with_us.token_ids == without_us.token_ids
        assert with_us.text == without_us.text
        assert with_us.finish_reason == without_us.finish_reason
        assert with_us.stop_reason == without_us.stop_reason
        _assert_same_logprobs(with_us.logprobs, without_us.logprobs)
    _assert_same_logprobs(got[index].prompt_logprobs, expected[index].prompt_logprobs)


def _assert_same_logprobs(with_us, without_us):
    if without_us is None:
        assert with_us is None
        return
    assert len(with_us) == len(without_us)
    for one, other in zip(with_us, without_us, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.keys() == other.keys()
        for token_id, logprob in other.items():
            assert one[token_id].logprob == pytest.approx(logprob.logprob, abs=LOGPROB_TOLERANCE)
            assert one[token_id].rank == logprob.rank


@pytest.mark.parametrize("method", METHODS)
def test_seeded_requests_survive_chunked_prefill(expected, method):
    """Plain vLLM on CPU dies of this: it rewinds generators that have no offset."""
    with engine(METHODS[method], max_num_batched_tokens=32, max_num_seqs=4) as llm:
        results = llm.generate(PROMPTS, params_of_each_prompt(), use_tqdm=False)
    for index, name in enumerate(PARAMETERS):
        if "logprobs" in name:
            continue  # prompt logprobs of chunks are compared above, in one piece
        ids = [output.token_ids for output in results[index].outputs]
        assert ids == [output.token_ids for output in expected[index].outputs], name


@pytest.mark.slow
class TestDistribution:
    """Unseeded samples of a small vocabulary, against the target's own probabilities."""

    # Digits follow digits, so that drafts are accepted within the small vocabulary of four.
    PROMPT = "1234567890 = 1221334455"
    NUM_SAMPLES = 3000
    FALSE_ALARM_RATE = 1e-4

    @pytest.fixture(scope="class")
    def tokens(self):
        digits = AutoTokenizer.from_pretrained(TARGET).convert_tokens_to_ids(list("0123456789"))
        best = self._next_probabilities([], digits).topk(4).indices
        return [digits[i] for i in best]

    def _next_probabilities(self, extra, allowed):
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        ids = tokenizer.encode(self.PROMPT) + extra
        logits = model(torch.tensor([ids])).logits[0, -1]
        return logits[allowed].softmax(-1)

    @pytest.fixture(scope="class")
    def probabilities(self, tokens):
        table = {}
        first = self._next_probabilities([], tokens)
        for i, token in enumerate(tokens):
            second = self._next_probabilities([token], tokens)
            for j, follower in enumerate(tokens):
                third = self._next_probabilities([token, follower], tokens)
                for k, last in enumerate(tokens):
                    table[token, follower, last] = float(first[i] * second[j] * third[k])
        return table

    @pytest.fixture(scope="class", params=METHODS)
    def samples(self, request, tokens):
        params = SamplingParams(temperature=1.0, max_tokens=3, allowed_token_ids=tokens)
        with engine(METHODS[request.param], max_num_seqs=32) as llm:
            drafts = counter(llm, "spec_decode_num_accepted_tokens")
            outputs = generate(llm, [self.PROMPT] * self.NUM_SAMPLES, params)
            assert counter(llm, "spec_decode_num_accepted_tokens") > drafts
        return Counter(ids for (ids,) in outputs)

    def test_samples_fit_the_target(self, samples, probabilities):
        assert _chance_of_samples(samples, probabilities) > self.FALSE_ALARM_RATE

    def test_the_test_sees_a_wrong_distribution(self, samples, probabilities):
        flat = {key: p**0.7 for key, p in probabilities.items()}
        total = sum(flat.values())
        wrong = {key: p / total for key, p in flat.items()}
        assert _chance_of_samples(samples, wrong) < self.FALSE_ALARM_RATE


def _chance_of_samples(samples: Counter, probabilities: dict) -> float:
    """Of samples that fit as badly, by Pearson's test; cells that expect under 5 are merged."""
    count = sum(samples.values())
    cells = sorted(probabilities.items(), key=lambda item: item[1])
    statistic, degrees, expected, observed = 0.0, -1, 0.0, 0
    for key, probability in cells:
        expected += count * probability
        observed += samples[key]
        if expected >= 5:
            statistic += (observed - expected) ** 2 / expected
            degrees, expected, observed = degrees + 1, 0.0, 0
    half = torch.tensor([degrees, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))
