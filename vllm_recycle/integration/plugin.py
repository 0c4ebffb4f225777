"""The entry point `vllm.general_plugins`: teaches vLLM our method names.

vLLM calls `register` in every process, sometimes more than once.
"""

from __future__ import annotations


def register() -> None:
    """Install the shims of `versions`.

    Raises:
        RuntimeError: vLLM is not of a supported version.

    """
    from vllm_recycle.integration import engine_config, opt_out, row_budget, versions

    versions.check_vllm_version()
    versions.wrap_create_engine_config(
        engine_config.rewrite, row_budget.explain_missing_rows, engine_config.finish
    )
    versions.wrap_validate_spec_decode(opt_out.validate_sampling_params)
