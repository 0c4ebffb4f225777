"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values: `Settings.put`
writes them there, and `settings_of` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_recycle.integration.draft_limits import Schedule
from vllm_recycle.integration.options.base import TABLE, MethodOptions
from vllm_recycle.integration.options.hosted import HostedTrunkOptions
from vllm_recycle.integration.options.ouroboros import OUROBOROS, OuroborosOptions
from vllm_recycle.integration.options.ouroboros import PAPER as PAPER
from vllm_recycle.integration.options.ouroboros import DraftModelOptions as DraftModelOptions
from vllm_recycle.integration.options.token_recycling import TOKEN_RECYCLING, TokenRecyclingOptions
from vllm_recycle.integration.options.trunk import TrunkOptions

METHODS = (TOKEN_RECYCLING, OUROBOROS)
KEY = "vllm_recycle"  # in `additional_config`


def options_class(method: str, values: Mapping[str, Any]) -> type[MethodOptions]:
    """What the options of a method are, by what is given of them."""
    if method == TOKEN_RECYCLING:
        return HostedTrunkOptions if values.get("trunk") is not None else TokenRecyclingOptions
    return OuroborosOptions if values.get("preset") == PAPER else TrunkOptions


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
        values = {"method": self.options.method, **dataclasses.asdict(self.options)}
        size_settings = {"chooses_sizes": self.chooses_sizes, "table": self.table}
        return {**additional_config, KEY: {"options": values, **size_settings}}


def has_settings(vllm_config: Any) -> bool:
    """Whether an engine runs one of our methods."""
    return bool(vllm_config.additional_config.get(KEY))


def settings_of(vllm_config: Any) -> Settings:
    """The settings of an engine."""
    values = vllm_config.additional_config[KEY]
    options = {**values["options"]}
    option_class = options_class(options.pop("method"), options)
    return Settings(**values | {"options": option_class(**options)})


def put_table_back(vllm_config: Any) -> None:
    """Give vLLM the sizes again, which it takes away whenever it completes a configuration."""
    setattr(vllm_config.speculative_config, TABLE, settings_of(vllm_config).table)
