"""What engine arguments say of speculation, before anything is known of it but its form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_recycle.core.state_file import is_int, shorten
from vllm_recycle.integration.options.base import TABLE, expect
from vllm_recycle.integration.options.limits import Schedule

ANY = 1 << 62
# vLLM's flags for some of the keys.
FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}


def given_keys(engine_args: Any, methods: Sequence[str]) -> dict[str, Any] | None:
    """The keys and values of a speculative configuration of ours, None of any other.

    Raises ValueError for what is no configuration, a method that is nearly ours, keys that are no
    names or are given twice.
    """
    config = engine_args.speculative_config
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(
            f"speculative_config: got {shorten(config)}, expected an object, such as "
            '{"method": "token_recycling"}'
        )
    config = config or {}
    flags = {key: getattr(engine_args, flag) for key, flag in FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    method = config.get("method")
    method = flags.get("method") if method is None else method
    expect("method", method, method is None or isinstance(method, str), "a name")
    if method not in methods:
        # A name that is nearly one of ours; vLLM would answer with its own forty.
        plain = (method or "").lower().replace("-", "_")
        for close in get_close_matches(plain, methods, n=1, cutoff=0.7):
            raise ValueError(f"speculative_config: method is {method!r}, did you mean {close!r}?")
        return None
    values = _by_name(config)
    if isinstance(trunk := values.get("trunk"), Mapping):
        values["trunk"] = _by_name(trunk, " of trunk")
    for key in flags:
        if values.get(key) is not None:
            raise ValueError(
                f"--{FLAGS[key].replace('_', '-')} is given and {key!r} of speculative_config too, "
                "expected one of them"
            )
    return values | flags


def _by_name(config: Mapping[Any, Any], place: str = "") -> dict[str, Any]:
    """The values of a configuration, by keys as vLLM names its fields.

    Raises ValueError for keys that are no names or are given twice; `place` says where, in words.
    """
    names: dict[str, str] = {}
    for key in config:
        if not isinstance(key, str):
            raise ValueError(f"speculative_config: key {shorten(key)}{place}, expected names")
        first_key = names.setdefault(key.replace("-", "_"), key)
        if first_key != key:
            raise ValueError(
                f"speculative_config: {first_key!r} and {key!r} are one key{place}, expected one "
                "of them"
            )
    return {name: _plain(config[key]) for name, key in names.items()}


def _plain(value: Any) -> Any:
    """A value as it travels to other processes; of a path its text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_table(table: Any, num_nodes: int) -> Schedule | None:
    """vLLM's table of nodes by the size of the batch, as the user gives it, if at all.

    Raises ValueError if it has what vLLM would take for numbers, more nodes than a tree has, or no
    ranges that vLLM accepts.
    """
    if table is None:
        return None
    is_table = (
        isinstance(table, list | tuple)
        and len(table) > 0
        and all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in table)
        and all(
            is_int(start, 1, ANY) and is_int(end, start, ANY) and is_int(nodes, 0, ANY)
            for start, end, nodes in table
        )
    )
    expect(TABLE, table, is_table, "a list of [first batch size, last batch size, nodes]")
    max_nodes = max(nodes for _, _, nodes in table)
    if max_nodes > num_nodes:
        raise ValueError(
            f"speculative_config: {TABLE} has {max_nodes} nodes, expected at most the {num_nodes} "
            "that a tree has"
        )
    try:
        return validate_and_normalize_dynamic_sd_schedule(list(table))
    except ValueError as error:
        raise ValueError(f"speculative_config: {TABLE} is {shorten(table)}: {error}") from error
