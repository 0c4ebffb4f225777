"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values: `put` writes
them there, `options_of`, `chooses_sizes` and `table_of` read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm_recycle.integration.draft_limits import Schedule
from vllm_recycle.integration.options.base import TABLE, MethodOptions
from vllm_recycle.integration.options.ouroboros import OUROBOROS, OuroborosOptions
from vllm_recycle.integration.options.ouroboros import PAPER as PAPER
from vllm_recycle.integration.options.ouroboros import DraftModelOptions as DraftModelOptions
from vllm_recycle.integration.options.token_recycling import TOKEN_RECYCLING, TokenRecyclingOptions
from vllm_recycle.integration.options.trunk import TrunkOptions

METHODS = (TOKEN_RECYCLING, OUROBOROS)
KEY = "vllm_recycle"  # in `additional_config`
CHOOSES_SIZES, TABLE_OF_SIZES = "chooses_sizes", "table_of_sizes"


def options_class(method: str, values: Mapping[str, Any]) -> type[MethodOptions]:
    """What the options of a method are, by what is given of them."""
    if method == TOKEN_RECYCLING:
        return TokenRecyclingOptions
    return OuroborosOptions if values.get("preset") == PAPER else TrunkOptions


def put(
    additional_config: dict[str, Any],
    options: MethodOptions,
    *,
    chooses_sizes: bool,
    table: Schedule,
) -> dict[str, Any]:
    """A copy of vLLM's additional configuration with options of ours.

    `chooses_sizes` says whether the sizes of drafts are chosen step by step, `table` what they are
    where they are not.
    """
    values = {"method": options.method, **dataclasses.asdict(options)}
    values |= {CHOOSES_SIZES: chooses_sizes, TABLE_OF_SIZES: table}
    return {**additional_config, KEY: values}


def options_of(vllm_config: Any) -> MethodOptions:
    """The options of an engine."""
    values = {**vllm_config.additional_config[KEY]}
    del values[CHOOSES_SIZES], values[TABLE_OF_SIZES]
    return options_class(values.pop("method"), values)(**values)


def chooses_sizes(vllm_config: Any) -> bool:
    """Whether the sizes of an engine's drafts are chosen step by step."""
    return vllm_config.additional_config[KEY][CHOOSES_SIZES]


def table_of(vllm_config: Any) -> Schedule:
    """The sizes of an engine's drafts by the number of requests, as vLLM takes them."""
    return vllm_config.additional_config[KEY][TABLE_OF_SIZES]


def put_table_back(vllm_config: Any) -> None:
    """Give vLLM the sizes again, which it takes away whenever it completes a configuration."""
    setattr(vllm_config.speculative_config, TABLE, table_of(vllm_config))
