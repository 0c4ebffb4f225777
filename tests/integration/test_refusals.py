"""What the methods do not go with is named before an engine starts, or chains are drafted there."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from engines import make_config
from random_models import granite_hybrid

from vllm_recycle.integration import config as engine_config
from vllm_recycle.integration import platform, refusals
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.plugin import register


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"async_scheduling": True}, "--async-scheduling"),
        ({"data_parallel_size": 2, "hf_overrides": {"num_local_experts": 4}},
         "--data-parallel-size above 1 with a mixture-of-experts model"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2,
          "hf_overrides": {"num_local_experts": 4}},
         "--enable-expert-parallel on several ranks on a CPU"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 on a CPU"),
        # vLLM 0.33 has words of its own.
        ({"kv_cache_dtype": "float16"}, "float16 on a CPU|float16\" is incompatible with dtype"),
    ],
)  # fmt: skip
def test_features_that_are_not_supported(flags, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        make_config(**flags)


REFUSED_BY_CONFIG = {
    "decode_context_parallel_size": ("parallel_config", 2),
    "prefill_context_parallel_size": ("parallel_config", 2),
    "enable_dbo": ("parallel_config", True),
    "enable_elastic_ep": ("parallel_config", True),
    "enable_batch_sharded_sampling": ("parallel_config", True),
    "return_sampling_mask": ("model_config", True),
    "enable_trace_replay": ("model_config", True),
    "runner_type": ("model_config", "pooling"),
    "logits_processors": ("model_config", ["a:b"]),
    "enable_return_routed_experts": ("aux_output_config", True),
    "watermark_config": (None, object()),
    "diffusion_config": (None, object()),
}


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"kv_offloading_size": 1.0}, "--kv-transfer-config or --kv-offloading-size"),
        ({"hf_overrides": {"rswa_window": 64}}, "a model with reference sliding-window attention"),
        ({"hf_overrides": {"attn_logit_softcapping": 30.0}}, "a model with a logits soft cap"),
        ({"dtype": "float16"}, "a model with float16 on a CPU"),
        (
            {"hf_overrides": {"head_dim": 40}},
            "a model with heads of 40 numbers (no multiple of 16) on a CPU",
        ),
    ],
)
def test_where_trees_do_not_go_chains_do(flags, feature, monkeypatch):
    said = []
    monkeypatch.setattr(engine_config.logger, "info", lambda *words: said.append(words))
    options = settings_of(make_config({"max_nodes": 10}, **flags)).options
    assert said == [("%s drafts chains: trees do not go with %s", "token_recycling", feature)]
    assert (options.tree, options.num_nodes) == ("chain", 10)
    for method in ({"tree": "default"}, {"preset": "paper"}):
        with pytest.raises(NotImplementedError, match=re.escape(f"does not support {feature}")):
            make_config(method, **flags)


def test_models_with_states_have_short_chains(tmp_path):
    model = granite_hybrid(tmp_path / "model")
    options = settings_of(make_config(model=model)).options
    assert (options.tree, options.num_nodes) == ("chain", 4)
    assert (
        settings_of(make_config({"tree": "chain", "max_nodes": 9}, model=model)).options.num_nodes
        == 9
    )
    with pytest.raises(NotImplementedError, match="does not support a hybrid or Mamba model;"):
        make_config({"tree": "default"}, model=model)


@pytest.mark.parametrize("name", REFUSED_BY_CONFIG)
def test_every_refusal_names_its_flag(name):
    """Those that this machine or model cannot turn on by themselves: set on a good config."""
    config = make_config()
    part, value = REFUSED_BY_CONFIG[name]
    owner = config if part is None else getattr(config, part)
    object.__setattr__(owner, name, value)
    flag = "--runner" if name == "runner_type" else f"--{name.replace('_', '-')}"
    with pytest.raises(NotImplementedError, match=flag):
        engine_config.finish(config)


def test_what_was_right_on_a_cpu_alone_is_refused_on_a_gpu():
    config = make_config(kv_sharing_fast_prefill=True)
    config.ec_transfer_config = object()
    on_cpu, on_gpu = (refusals.unsupported(config, on_v2=on_v2) for on_v2 in (False, True))
    assert not any(on_cpu.values())
    assert [feature for feature, present in on_gpu.items() if present] == [
        "--kv-sharing-fast-prefill on a GPU",
        "--ec-transfer-config on a GPU",
    ]


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_states_in_the_prefix_cache_are_refused_on_a_gpu(caches_prefixes, tmp_path):
    model = granite_hybrid(tmp_path / "model")
    config = make_config(model=model, enable_prefix_caching=caches_prefixes)
    on_cpu, on_gpu = (refusals.unsupported(config, on_v2=on_v2) for on_v2 in (False, True))
    assert not any(on_cpu.values())
    refused = [feature for feature, present in on_gpu.items() if present]
    assert refused == ["--enable-prefix-caching with recurrent layers on a GPU"] * caches_prefixes


def test_other_platforms_are_refused(monkeypatch):
    other = SimpleNamespace(is_cuda=lambda: False, device_type="abacus", device_name="abacus")
    monkeypatch.setattr(platform, "current_platform", other)
    message = r"got platform 'abacus', expected one of \['cpu', 'cuda'\]"
    with pytest.raises(NotImplementedError, match=message):
        make_config()


def test_model_runner_v2_is_refused_on_cpu(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        make_config()


def test_batch_invariance_is_refused(monkeypatch):
    config = make_config()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(NotImplementedError, match="VLLM_BATCH_INVARIANT=1"):
        engine_config.finish(config)


def test_installed_logits_processors_are_refused(monkeypatch):
    monkeypatch.setattr(refusals, "entry_points", lambda group: [group])
    with pytest.raises(NotImplementedError, match=r"vllm\.logits_processors"):
        make_config()
