"""Hints: what an answer may say, or be like, makes it fewer steps and changes nothing of it.

    python examples/hints.py
    python examples/hints.py --model DIR --max-tokens 128

Asks for an answer without a hint, with a right one and with a wrong one, and prints how many steps
the target made. Over HTTP it is `"vllm_xargs": {"hint": TEXT}`, or in a chat completion OpenAI's
`prediction`. Under the scope `isolated`, as here, nobody else's drafts depend on it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams

EXAMPLES = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "prompts/humaneval.jsonl")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    lines = args.prompts.read_text(encoding="utf-8").split("\n")
    prompt, other = (json.loads(line)["prompt"] for line in lines[:2])
    llm = LLM(
        args.model,
        dtype="float32",  # so that outputs are equal to the last token
        speculative_config={"method": "token_recycling", "scope": "isolated"},
        per_request_spec_decode_metrics="summary",
        kv_cache_memory_bytes=2**30,  # by default most of the memory
        disable_log_stats=False,  # for the counts of a request
    )

    def ask(hint: str | None) -> str:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
        if hint is not None:
            params.extra_args = {"hint": hint}
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        accepted = output.spec_decode_metrics.to_dict()["num_accepted_draft_tokens"]
        print(f"{len(output.token_ids)} tokens, {len(output.token_ids) - accepted} steps")
        return output.text

    answer = ask(None)
    # A real one is from a template, an earlier run, or the file as it should be.
    assert ask(hint=answer) == answer
    assert ask(hint=other) == answer
    print(answer)


if __name__ == "__main__":
    main()
