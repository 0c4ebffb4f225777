"""The environment variable `VLLM_RECYCLE`: a method for engines that are given none.

It is for trainers that make engines themselves, and for all engines of a container. An engine that
the method does not support runs without drafts.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_recycle.core.state_file import shorten
from vllm_recycle.integration.options import KEY, METHODS, has_settings
from vllm_recycle.integration.options.given import FLAGS
from vllm_recycle.integration.start.config import OptionError
from vllm_recycle.integration.start.refusals import one_line

logger = init_logger("vllm.recycle")

VARIABLE = "VLLM_RECYCLE"
OFF = ("", "0", "off", "false", "no", "none", "null")


def read_variable() -> dict[str, Any] | None:
    """The speculative configuration that the variable has, None where it is off.

    Raises ValueError for anything but an object with one of our methods.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() in OFF:
        return None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("method") not in METHODS:
        expected = f'an object with a "method" of {", ".join(METHODS)}'
        raise ValueError(f"{VARIABLE}: got {shorten(text)}, expected {expected}")
    return config


def create_config(make: Callable[[Any], Any], engine_args: Any) -> Any:
    """The configuration of an engine, with the variable's method where it is given none.

    Where the method does not go with the engine, the configuration is plain, and one line says why.

    Args:
        make: makes a configuration of engine arguments.
        engine_args: vLLM's, as the user gives them.

    Raises:
        ValueError: a wrong value of the variable, by its name; what `make` raises of plain engines.
    """
    additional = engine_args.additional_config
    switch = additional.get(KEY) if isinstance(additional, dict) else None
    flags = (getattr(engine_args, flag) for flag in FLAGS.values())
    is_given = any(value is not None for value in (engine_args.speculative_config, *flags))
    if is_given or switch is False or (config := read_variable()) is None:
        return make(engine_args)
    if switch is not None:
        raise ValueError(f"additional_config: {KEY} is {shorten(switch)}, expected false")
    drafting = copy.copy(engine_args)
    drafting.speculative_config = config
    try:
        vllm_config = make(drafting)
    except OptionError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    except Exception as error:  # whatever it is, plain vLLM may go without
        if engine_args.nnodes > 1 and not isinstance(error, NotImplementedError):
            raise  # another node may not have it
        reason = one_line(error)
        logger.debug("without %s:", VARIABLE, exc_info=True)
    else:
        if has_settings(vllm_config):
            logger.info("%s turns speculation on: %s", VARIABLE, shorten(config))
        return vllm_config
    vllm_config = make(engine_args)
    is_pooling = vllm_config.model_config.runner_type == "pooling"
    log = logger.info if is_pooling else logger.warning
    log("%s is not used for this engine: %s", VARIABLE, reason)
    return vllm_config
