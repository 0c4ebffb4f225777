"""The words between our scheduler and our runners that vLLM's output of a step has no place for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_recycle.core.curve import TRUNKS
from vllm_recycle.core.owners import Owner


@dataclass(slots=True)
class StepNote:
    """What the scheduler says of a step.

    Attributes:
        parents: by request, the parent row of each node of its scheduled draft (V1 runner).
        grammar_starts: by request that follows a grammar, the tokens of its output before those
            that do (V1 runner).
        idle_sessions: requests with streamed prompts that wait for more input, or for room (V1
            runner). Each comes back as a new request.
        owners: of requests that start in the step and have one.
        kind: of the drafts that are made in the step (Model Runner V2).

    """

    parents: Mapping[str, Sequence[int]] = field(default_factory=dict)
    grammar_starts: Mapping[str, int] = field(default_factory=dict)
    idle_sessions: Sequence[str] = ()
    owners: Mapping[str, Owner] = field(default_factory=dict)
    kind: str = TRUNKS  # if there is a draft model


def note_of(scheduler_output: Any) -> StepNote:
    """The note of a step; an empty one for steps that no scheduler made, as in warm-ups."""
    return getattr(scheduler_output, "step_note", None) or StepNote()
