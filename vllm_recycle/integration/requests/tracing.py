"""What the trace of a request says of its drafts, where vLLM counts them for each request."""

from __future__ import annotations

from typing import Any

# By attribute what vLLM counts, as it names what it adds to the conventions of OpenTelemetry.
COUNTS = {
    "gen_ai.usage.draft_tokens": "num_draft_tokens",
    "gen_ai.usage.accepted_draft_tokens": "num_accepted_draft_tokens",
    "gen_ai.usage.draft_steps": "num_spec_steps",
}


def span_attributes(req_state: Any) -> dict[str, int]:
    """Of a request that has ended, given vLLM's `RequestState`.

    Counted by `--per-request-spec-decode-metrics`; without it there are none.
    """
    if req_state.spec_decode_metrics is None:
        return {}
    counted = req_state.spec_decode_metrics.to_dict()
    return {attribute: counted[name] for attribute, name in COUNTS.items()}
