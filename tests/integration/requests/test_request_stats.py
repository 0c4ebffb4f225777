"""What vLLM's metrics say of requests: as of plain decoding, and what drafts brought them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.engines import GROWN, counter, engine, read_prompts
from vllm_recycle.integration.requests.stats import NAME

COUNTED = ["request_generation_tokens", "request_max_num_generation_tokens"]
PROMPTS = read_prompts(16)


def run(llm: Any, stops: list[str | None]) -> dict[str, Any]:
    """What an engine says of requests, of which some have a stop string."""
    params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in stops]
    (sampled, sizes), (before, _) = watch_outputs(llm), counted(llm)
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS, params, use_tqdm=False)]
    after, histogram = counted(llm)
    return {
        "outputs": outputs,
        "sampled": sum(sampled),
        "sizes": sizes,
        "counted": [count - earlier for count, earlier in zip(after, before, strict=True)],
        "histogram": histogram,
    }


def counted(llm: Any) -> tuple[list[float], Any]:
    """Tokens by three of vLLM's metrics, and our histogram."""
    histograms = {one.name: one for one in llm.get_metrics() if hasattr(one, "buckets")}
    sums = [histograms[f"vllm:{name}"].sum for name in COUNTED]
    return [counter(llm, "generation_tokens"), *sums], histograms.get(NAME)


def watch_outputs(llm: Any) -> tuple[list[int], dict[str, list[int]]]:
    """How many tokens come in each step from now on, and how many of them a request is given."""
    processor, sampled, sizes = llm.llm_engine.output_processor, [], {}
    process = processor.process_outputs

    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        sampled.extend(len(output.new_token_ids) for output in outputs)
        result = process(outputs, *args, **kwargs)
        for output in outputs:
            sizes.setdefault(output.request_id, []).append(len(output.new_token_ids))
        return result

    processor.process_outputs = watched
    return sampled, sizes


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    """Without speculation, and with trees. Most requests end in the middle of their text."""
    with engine() as llm:
        texts = [output.text for output in run(llm, [None] * len(PROMPTS))["outputs"]]
        stops = [text[10 + i : 13 + i] or None if i % 4 else None for i, text in enumerate(texts)]
        plain = run(llm, stops)
    with engine(GROWN, per_request_spec_decode_metrics="summary") as llm:
        return plain, run(llm, stops)


def test_tokens_behind_a_stop_string_are_not_counted(found):
    plain, trees = found
    tokens = [[list(output.token_ids) for output in one["outputs"]] for one in found]
    assert tokens[0] == tokens[1]
    assert plain["counted"] == trees["counted"] == [sum(map(len, tokens[0]))] * 3
    assert trees["sampled"] > sum(map(len, tokens[0])) == plain["sampled"]


def test_a_request_says_what_was_accepted_however_it_ends(found):
    plain, trees = found
    assert {output.stop_reason is None for output in trees["outputs"]} == {False, True}
    said = [output.spec_decode_metrics for output in trees["outputs"]]
    assert all(sum(metrics.histogram) > 0 < metrics.num_draft_tokens for metrics in said)
    assert [output.spec_decode_metrics for output in plain["outputs"]] == [None] * len(PROMPTS)


def test_the_histogram_of_accepted_tokens_has_each_request_once(found):
    plain, trees = found
    decoded = [sizes[1:] for sizes in trees["sizes"].values() if len(sizes) > 1]
    expected = [sum(sizes) / len(sizes) - 1 for sizes in decoded]
    histogram = trees["histogram"]
    assert histogram.count == len(expected) > 6
    assert histogram.sum == pytest.approx(sum(expected))
    for bound, count in histogram.buckets.items():
        assert count == sum(value <= float(bound) for value in expected)
    assert plain["histogram"] is None
