"""What the methods do not go with is named before an engine starts, or chains are drafted there."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.integration.engines import PUBLISHED, TARGET, make_config
from tests.integration.models.random_models import granite_hybrid
from vllm_recycle.integration.options import has_settings, settings_of
from vllm_recycle.integration.start import config as engine_config
from vllm_recycle.integration.start import platform, refusals

pytestmark = pytest.mark.versions

RECYCLING = '{"method": "token_recycling"}'


@pytest.fixture
def logged(monkeypatch) -> list[tuple[str, str]]:
    """What the package says while configurations are made: (level, line)."""
    lines: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            engine_config.logger,
            level,
            lambda line, *args, level=level: lines.append((level, line % args)),
        )
    return lines


@pytest.mark.parametrize(
    ("variable", "flags", "reason"),
    [
        # Before vLLM makes a configuration, behind that, and by a plain ValueError.
        (RECYCLING, {"async_scheduling": True}, "does not support --async-scheduling"),
        (RECYCLING, {"logits_processors": ["a:b"]}, "does not support --logits-processors"),
        (RECYCLING, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, "budget_share is 0.5"),
        # vLLM's own words, which have several lines.
        ('{"method": "ouroboros", "model": "/none"}', {}, "local directory specified: '/none'."),
    ],
)
def test_an_engine_that_the_environment_does_not_go_with_is_plain(
    variable, flags, reason, logged, monkeypatch
):
    arguments = EngineArgs(TARGET, dtype="float32", enforce_eager=True, **flags)
    plain = copy.copy(arguments).create_engine_config()
    monkeypatch.setenv("VLLM_RECYCLE", variable)
    config = arguments.create_engine_config()
    assert config.speculative_config is None
    assert config.compute_hash() == plain.compute_hash()
    [(level, line)] = logged
    assert level == "warning"
    assert line.startswith("VLLM_RECYCLE is not used for this engine: ")
    assert reason in line
    assert "\n" not in line
    assert "--speculative-config" not in line


def sentence_transformer(folder: Path) -> str:
    """The target as a folder of sentence-transformers, which embeds without a flag."""
    shutil.copytree(TARGET, folder)
    parts = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.mark.parametrize(
    "flags", [{"runner": "pooling"}, {"convert": "embed"}, {"convert": "classify"}, {}]
)
def test_a_pooling_engine_is_left_alone_by_the_environment(
    flags, logged, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_RECYCLE", RECYCLING)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    model = TARGET if flags else sentence_transformer(tmp_path / "model")
    config = EngineArgs(model, dtype="float32", **flags).create_engine_config()
    assert config.model_config.runner_type == "pooling"
    assert (config.speculative_config, has_settings(config)) == (None, False)
    assert [level for level, _ in logged] == ["info"]
    assert "VLLM_RECYCLE is not used for this engine: " in logged[0][1]
    assert not [record for record in caplog.records if "speculative" in record.getMessage().lower()]


@pytest.mark.parametrize(
    ("model", "flags"),
    [("/none", {}), (TARGET, {"max_model_len": 1 << 40}), (TARGET, {"quantization": "oak"})],
)
def test_an_error_of_plain_vllm_stays_that(model, flags, monkeypatch):
    errors = []
    for variable in ("", RECYCLING):
        monkeypatch.setenv("VLLM_RECYCLE", variable)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            EngineArgs(model, **flags).create_engine_config()
        errors.append(raised.value)
    plain, error = errors
    assert (type(error), str(error)) == (type(plain), str(plain))


@pytest.fixture
def hub_target(tmp_path, monkeypatch) -> str:
    """The target as a hub's model that is in the cache; newer vLLM takes no folder as verifier."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--tests--target"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    shutil.copytree(TARGET, repository / "snapshots" / "0")
    return "tests/target"


def checkpoint_with_a_head(folder: Path, verifier_name: str) -> str:
    """An EAGLE-3 head for the target, in the format of speculators, which vLLM serves with both."""
    target = json.loads((Path(TARGET) / "config.json").read_text())
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    verifier = {"name_or_path": verifier_name, "architectures": target["architectures"]}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": target["vocab_size"],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": proposals,
            "verifier": verifier,
        },
        "transformer_layer_config": target | {"num_hidden_layers": 1},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_checkpoint_with_a_head_keeps_it(has_kernels, logged, hub_target, tmp_path, monkeypatch):
    monkeypatch.setattr(platform.Platform, "has_kernels", lambda _: has_kernels)
    model = checkpoint_with_a_head(tmp_path / "checkpoint", hub_target)
    arguments = EngineArgs(model, dtype="float32", speculative_config=json.loads(RECYCLING))
    if has_kernels:
        with pytest.raises(NotImplementedError, match="brings vLLM's method 'eagle3'; leave out"):
            arguments.create_engine_config()
    monkeypatch.setenv("VLLM_RECYCLE", RECYCLING)
    config = EngineArgs(model, dtype="float32").create_engine_config()
    assert (config.speculative_config.method, has_settings(config)) == ("eagle3", False)
    assert config.speculative_config.num_speculative_tokens == 3
    assert [level for level, _ in logged] == ["warning"] * has_kernels


REFUSED_BY_CONFIG = {
    "decode_context_parallel_size": ("parallel_config", 2),
    "prefill_context_parallel_size": ("parallel_config", 2),
    "enable_dbo": ("parallel_config", True),
    "enable_elastic_ep": ("parallel_config", True),
    "enable_batch_sharded_sampling": ("parallel_config", True),
    "return_sampling_mask": ("model_config", True),
    "enable_trace_replay": ("model_config", True),
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
        ({"hf_overrides": {"block_configs": [{}]}}, "a model whose layers differ in KV heads"),
        ({"hf_overrides": {"attn_logit_softcapping": 30.0}}, "a model with a logits soft cap"),
        ({"dtype": "float16"}, "a model with float16 on a CPU"),
        ({"hf_overrides": {"head_dim": 40}},
         "a model with heads of 40 numbers (no multiple of 16) on a CPU"),
    ],
)  # fmt: skip
def test_where_trees_do_not_go_chains_do(flags, feature, logged):
    options = settings_of(make_config({"max_nodes": 10}, **flags)).options
    said = f"token_recycling drafts chains: trees do not go with {feature}"
    assert logged == [("info", said)]
    assert (options.tree, options.num_nodes) == ("chain", 10)
    for method in ({"tree": "default"}, {"preset": "paper"}):
        with pytest.raises(NotImplementedError, match=re.escape(f"does not support {feature}")):
            make_config(method, **flags)


def test_models_with_states_have_short_chains(tmp_path):
    model = granite_hybrid(tmp_path / "model")
    for method, num_nodes in (({}, 4), ({"tree": "chain", "max_nodes": 9}, 9)):
        options = settings_of(make_config(method, model=model)).options
        assert (options.tree, options.num_nodes) == ("chain", num_nodes)
    with pytest.raises(NotImplementedError, match="does not support a hybrid or Mamba model;"):
        make_config({"tree": "default"}, model=model)
    for caches_prefixes in (False, True):
        config = make_config(model=model, enable_prefix_caching=caches_prefixes)
        refused = ["--enable-prefix-caching with recurrent layers on a GPU"] * caches_prefixes
        assert refused_on_a_gpu_alone(config) == refused


def refused_on_a_gpu_alone(config: Any) -> list[str]:
    on_cpu, on_gpu = (refusals.unsupported(config, on_v2=on_v2) for on_v2 in (False, True))
    assert not any(on_cpu.values())
    return [feature for feature, present in on_gpu.items() if present]


def test_what_was_right_on_a_cpu_alone_is_refused_on_a_gpu():
    config = make_config(kv_sharing_fast_prefill=True)
    config.ec_transfer_config = object()
    flags = ("--kv-sharing-fast-prefill", "--ec-transfer-config")
    assert refused_on_a_gpu_alone(config) == [f"{flag} on a GPU" for flag in flags]


@pytest.mark.parametrize("name", REFUSED_BY_CONFIG)
def test_every_refusal_names_its_flag(name):
    """Those that this machine or model cannot turn on by themselves: set on a good config."""
    config = make_config()
    part, value = REFUSED_BY_CONFIG[name]
    owner = config if part is None else getattr(config, part)
    object.__setattr__(owner, name, value)
    with pytest.raises(NotImplementedError, match=f"--{name.replace('_', '-')}"):
        engine_config.settle(config)


ABACUS = SimpleNamespace(is_cuda=lambda: False, device_type="abacus", device_name="abacus")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((platform, "current_platform", ABACUS), r"'abacus', expected one of \['cpu', 'cuda'\]"),
        ((refusals, "entry_points", lambda group: [group]), r"vllm\.logits_processors"),
        (("VLLM_BATCH_INVARIANT", "1"), "VLLM_BATCH_INVARIANT=1"),
    ],
)
def test_what_an_engine_runs_with_is_refused(place, message, monkeypatch):
    config = make_config()
    (monkeypatch.setenv if len(place) == 2 else monkeypatch.setattr)(*place)
    with pytest.raises(NotImplementedError, match=message):
        engine_config.settle(config)


def test_model_runner_v2_is_refused_on_cpu(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(NotImplementedError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        make_config()


@pytest.mark.parametrize("method", [None, PUBLISHED])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 512, "max_num_scheduled_tokens": 300},
        {"max_num_batched_tokens": 512, "max_num_seqs": 4},
    ],
)
def test_with_lora_steps_are_as_large_as_without(flags, method):
    """Though vLLM asks for room for whole drafts of all requests."""
    plain, lora = (make_config(method, enable_lora=on, **flags) for on in (False, True))
    assert lora.scheduler_config == plain.scheduler_config
    ranges = [c.compilation_config.compile_ranges_endpoints for c in (plain, lora)]
    assert ranges[0] == ranges[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "or equal to max_num_seqs"),
        ({"max_num_batched_tokens": 64, "enable_chunked_prefill": False}, "smaller than max_mod"),
    ],
)
def test_what_vllm_refuses_without_lora_it_refuses_with_it(flags, message):
    for on in (False, True):
        with pytest.raises(ValueError, match=message):
            make_config(enable_lora=on, **flags)
