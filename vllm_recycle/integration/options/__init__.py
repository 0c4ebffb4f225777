"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values: `Settings.put`
writes them there, and `settings_of` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_recycle.integration.options.base import OUROBOROS
from vllm_recycle.integration.options.limits import Schedule
from vllm_recycle.integration.options.ouroboros import PAPER, OuroborosOptions
from vllm_recycle.integration.options.token_recycling import TOKEN_RECYCLING, TokenRecyclingOptions

METHODS = (TOKEN_RECYCLING, OUROBOROS)
MethodOptions = OuroborosOptions | TokenRecyclingOptions
KEY = "vllm_recycle"  # in `additional_config`


def options_class(values: Mapping[str, Any]) -> type[MethodOptions]:
    """What the options of a method are, by what is given of them."""
    is_published = values["method"] == OUROBOROS and values.get("preset") == PAPER
    return OuroborosOptions if is_published else TokenRecyclingOptions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine of ours runs with.

    Attributes:
        options: what the user wrote, and defaults.
        chooses_sizes: whether the sizes of drafts are chosen step by step (Model Runner V2).
        table: sizes by the number of requests, as vLLM takes them, where they are not chosen.
    """

    options: MethodOptions
    chooses_sizes: bool
    table: Schedule

    def put(self, additional_config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of vLLM's additional configuration with these, as plain values."""
        return {**additional_config, KEY: dataclasses.asdict(self)}


def has_settings(vllm_config: Any) -> bool:
    """Whether an engine runs one of our methods."""
    return bool(vllm_config.additional_config.get(KEY))


def settings_of(vllm_config: Any) -> Settings:
    """The settings of an engine."""
    values = vllm_config.additional_config[KEY]
    options = values["options"]
    return Settings(**values | {"options": options_class(options)(**options)})
