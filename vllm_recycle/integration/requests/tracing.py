"""What the trace of a request says of its drafts, where vLLM counts them for each request."""

from __future__ import annotations

from typing import Any

# As vLLM names what it adds to the conventions of OpenTelemetry.
DRAFTED = "gen_ai.usage.draft_tokens"
ACCEPTED = "gen_ai.usage.accepted_draft_tokens"
STEPS = "gen_ai.usage.draft_steps"


def span_attributes(req_state: Any) -> dict[str, int]:
    """Of a request that has ended, given vLLM's `RequestState`.

    Counted by `--per-request-spec-decode-metrics`; without it there are none.
    """
    if req_state.spec_decode_metrics is None:
        return {}
    counted = req_state.spec_decode_metrics.to_dict()
    return {
        DRAFTED: counted["num_draft_tokens"],
        ACCEPTED: counted["num_accepted_draft_tokens"],
        STEPS: counted["num_spec_steps"],
    }
