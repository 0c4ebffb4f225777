"""Bad input ends in one clear error before an engine starts, naming what to change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs

from tests.integration.engines import (
    GROWN,
    HOSTED,
    OUROBOROS,
    PAPER,
    PUBLISHED,
    TARGET,
    TOKEN_RECYCLING,
    TRUNK,
    make_config,
)
from vllm_recycle.integration.options import METHODS, has_settings, settings_of
from vllm_recycle.integration.options.base import LENGTH, TABLE
from vllm_recycle.integration.options.given import given_keys
from vllm_recycle.integration.options.trunk import FIXED
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.start import config as engine_config
from vllm_recycle.integration.start.versions import ALLOW_UNTESTED

pytestmark = pytest.mark.versions


def test_good_options_are_accepted():
    for options, flags, num_tokens in (
        ({"k": 4, "tree": "default", "max_nodes": 3, "scope": "shared"}, {}, 3),
        ({"context-mib": 1, "num_speculative_tokens": 7}, {}, 7),
        ({}, {"spec_tokens": 8}, 8),
    ):
        config = make_config(options, **flags)
        assert config.speculative_config.num_speculative_tokens == num_tokens


def options_of(**options: Any) -> Any:
    return settings_of(make_config(options)).options


def test_a_preset_stands_for_the_keys_that_are_not_given():
    paper = options_of(preset="paper", tree=None)
    assert (paper.tree, paper.num_nodes, paper.row_cost) == ("paper-80", 80, 0)
    assert (list(paper.contexts), paper.scope, paper.seeds_from_prompts) == ([1], "shared", False)
    other = options_of(preset="paper", scope="sequence", tree="dynamic")
    assert (other.tree, other.num_nodes, other.scope) == ("dynamic", 80, "sequence")
    assert (list(other.contexts), other.row_cost) == ([1], 0)


HEAD = {"method": "eagle3", "model": "/no/head"}
LINE = 700  # characters that a message has at most
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
VARIABLE = '{"method": "token_recycling", "max_nodes": 7}'
PLAIN = {"additional_config": {"vllm_recycle": False}}


@pytest.mark.parametrize(
    ("said", "flags", "method"),
    [
        ("", {"speculative_config": NGRAM}, "ngram"),
        (VARIABLE, {}, "custom_class"),
        (VARIABLE, {"speculative_config": NGRAM}, "ngram"),
        (VARIABLE, PLAIN, None),
        (VARIABLE, PLAIN | {"speculative_config": GROWN | {"max_nodes": 7}}, "custom_class"),
        *((said, {}, None) for said in ("", " ", "0", "Off", "false", "NO", "none", "null")),
    ],
)
def test_the_environment_turns_a_method_on_where_nothing_is_given(said, flags, method, monkeypatch):
    monkeypatch.setenv("VLLM_RECYCLE", said)
    arguments = EngineArgs(TARGET, dtype="float32", **flags)
    config = arguments.create_engine_config()
    assert (arguments.speculative_config is None) == ("speculative_config" not in flags)
    assert (config.speculative_config and config.speculative_config.method) == method
    assert has_settings(config) == (method == "custom_class")
    if method == "custom_class":
        assert settings_of(config).options.num_nodes == 7
    else:
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


NO_METHOD = 'got .*, expected an object with a "method" of token_recycling, ouroboros'


@pytest.mark.parametrize(
    ("said", "flags", "message"),
    [
        *((said, {}, f"VLLM_RECYCLE: {NO_METHOD}") for said in ("yes", "[]", "[" * 20_000)),
        *((json.dumps(said), {}, f"VLLM_RECYCLE: {NO_METHOD}") for said in (NGRAM, {"k": 7})),
        (json.dumps(TOKEN_RECYCLING | {"nodes": 3}), {},
         "VLLM_RECYCLE: .*of token_recycling: unknown key 'nodes'"),
        (json.dumps(PAPER | {"tree": "oak"}), {}, "VLLM_RECYCLE: .*expected one of .*'paper-80'"),
        ('{"method": "ouroboros"}', {}, "VLLM_RECYCLE: .*'model' is missing"),
        (VARIABLE, {"additional_config": {"vllm_recycle": "off"}},
         ".*vllm_recycle is 'off', expected false"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_value_of_the_environment_is_refused_by_its_name(said, flags, message, monkeypatch):
    monkeypatch.setenv("VLLM_RECYCLE", said)
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$") as refused:
        EngineArgs(TARGET, dtype="float32", **flags).create_engine_config()
    assert len(str(refused.value)) < LINE


def test_vllm_knows_the_variables(monkeypatch):
    monkeypatch.setenv("VLLM_RECYCLE", '{"method": "token_recycling"}')
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)  # vLLM sets it, and does not know it
    register()
    EngineArgs(TARGET, dtype="float32", fail_on_environ_validation=True).create_engine_config()


def test_engine_arguments_can_be_used_twice():
    arguments = EngineArgs(TARGET, speculative_config={"method": "token_recycling"})
    arguments.create_engine_config()
    assert arguments.speculative_config == {"method": "token_recycling"}
    arguments.create_engine_config()


OTHER_KEYS = ("max_model_len", "kv_cache_dtype", TABLE, "prompt_lookup_max", "fly_window_size")
SMALL_STEP = {"max_num_batched_tokens": 64, "max_model_len": 64}
BAD_OPTIONS = [
    ({"branches": 3}, r"unknown key 'branches', expected any of \['method', 'preset', 'k'"),
    ({"k": 0}, "k is 0, expected an integer 1 to 64"),
    ({"k": 4, "tree": "paper-80"}, r"rank 4 is not below k = 4"),
    ({"max_nodes": 0}, "max_nodes is 0, expected an integer 1 to 256"),
    ({"max_nodes": True}, "max_nodes is True, expected an integer"),
    ({"contexts": [2]}, r"contexts is \[2\], expected lengths ascending from 1 to at most 16"),
    *(
        ({"contexts": lengths}, "expected lengths ascending")
        for lengths in ([], [0, 1], [1, 1], [1, 3, 2], [1, 17], [True], [1, 2.0], [1, "2"])
    ),
    ({"contexts": [1] * 100_000}, r"is \[1, .*\.\.\. \(300,000 characters\), expected lengths"),
    ({"contexts": 4}, "contexts is 4, expected a list"),
    ({"context_mib": 0}, "context_mib is 0, expected an integer 1 to 65536"),
    ({"row_cost": -1}, "row_cost is -1, expected a number, at least 0"),
    ({"preset": "oak"}, r"preset is 'oak', expected one of \['paper'\]"),
    ({"preset": "paper", "max_nodes": 81}, "got 81, expected at most the 80 nodes of tree 'pa"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, expected"),
    ({"scope": "global"}, r"scope is 'global', expected one of \['sequence', 'shared'"),
    ({"matrix_file": 3}, "matrix_file is 3, expected a path"),
    ({"matrix_file": ""}, "matrix_file is '', expected a path"),
    ({"matrix_file": "m", "scope": "isolated"}, "matrix_file is given with scope 'isolated'"),
    ({"matrix_file": "/no/such/"}, "expected a directory that exists, or a file"),
    ({"save_every": -1}, "save_every is -1, expected 0, or a number of seconds from 0.01 to 1,000"),
    ({"save_every": 1e-9}, "save_every is 1e-09, expected 0, or a number of seconds from 0.01"),
    ({"save_every": 60}, "save_every is 60, expected none without a file for what is learnt"),
    ({"seed_from_prompt": False}, "unknown key 'seed_from_prompt', expected any of"),
    ({"budget_share": 0}, "budget_share is 0, expected a number above 0"),
    ({"budget_share": 1e-300}, "budget_share is 1e-300, expected a token or more of --max-num"),
    ({"row-cost": 0, "row_cost": 0}, "'row-cost' and 'row_cost' are one key"),
    ({3: 4}, "key 3, expected names"),
    ({"x" * 10_000: 1}, r"unknown key 'x{199}\.\.\. \(10,002 characters\), expected any"),
    ({"tree": "y" * 10_000}, r"tree 'y{199}\.\.\. \(10,002 characters\): expected one of"),
    ({"matrix_file": "z" * 10_000}, r"matrix_file is 'z{199}\.\.\. .*: File name too long"),
    ({"matrix_file": "m\0"}, r"matrix_file is 'm\\x00', expected a path without NUL"),
    ({"matrix_file": "\ud800"}, "expected a path that UTF-8 can express"),
    ({"tree": "oak"}, "expected one of .*'paper-80'.* or the path of a JSON file"),
    ({"tree": 7}, "tree is 7, expected a name or a path"),
    ({"trunk": "eagle3"}, "trunk is 'eagle3', expected an object with \"method\""),
    ({"trunk": {}}, r"trunk is \{\}, expected an object with"),
    ({"trunk": {"method": "oak"}}, r"of trunk is 'oak', expected one of \['eagle', 'eagle3', 'mtp"),
    *(
        ({"trunk": {"method": name}}, f"method of trunk is {name!r}, expected one of")
        for name in ("dflash", "ngram", "ngram_gpu", "suffix")
    ),
    (
        {"trunk": {"method": "draft_model"}},
        "or the method 'ouroboros' with a draft model",
    ),
    ({"trunk": HEAD | {1: 2}}, "key 1 of trunk, expected names"),
    ({"trunk": HEAD | {"nope": 1}}, r"key 'nope' of trunk, expected any of \['method'"),
    ({"trunk": HEAD | {LENGTH: 3, "num-speculative-tokens": 3}}, "are one key of trunk, expected"),
    ({"trunk": {"method": "medusa", "moe_backend": "x"}}, "key 'moe_backend' of trunk, expected"),
    ({"trunk": {"method": "eagle"}}, "model of trunk is None, expected a path or a name on the"),
    ({"trunk": HOSTED["trunk"] | {"model": 5}}, "model of trunk is 5, expected a path or a name"),
    ({"trunk": HOSTED["trunk"] | {"model": "/no/head"}}, "local directory.* '/no/head'"),
    ({"trunk": HOSTED["trunk"] | {"draft-tensor-parallel-size": 0}}, "size is 0: Input should be"),
    ({"trunk": HOSTED["trunk"] | {"draft_tensor_parallel_size": 4}}, "size=4 cannot be"),
    ({"trunk": HEAD | {LENGTH: 0}}, "of trunk is 0, expected an integer 1 to"),
    *(
        ({"trunk": HEAD | {key: True}}, f"{key} of trunk is True, expected none or {value!r}")
        for key, value in FIXED.items()
    ),
    ({"trunk": HEAD | {"draft-sample-method": "probabilistic"}}, "of trunk is 'probabilistic'"),
    *(
        ({"trunk": HEAD | {key: None, "method": method}}, f"key {key!r} of trunk, expected any")
        for method in ("eagle3", "eagle")
        for key in OTHER_KEYS
    ),
    ({"trunk": HEAD, "tree": "default"}, "tree is 'default', expected 'dynamic'"),
    ({"trunk": HEAD, "k": 2}, "k is 2, expected at least the 3 choices"),
    ({"trunk": HEAD, "num_speculative_tokens": 0}, "num_speculative_tokens is 0, expected"),
]
BAD_OPTIONS_OF_OUROBOROS_AS_PUBLISHED = [
    ({"tree": "default"}, r"unknown key 'tree', expected any of \['method', 'model', 'draft_"),
    ({"model": 7}, "model is 7, expected a draft model's name or path"),
    ({"model": "org/eagle3"}, "is 'org/eagle3', which vLLM takes for one of its method 'eagle3'"),
    ({"gamma": 0}, "gamma is 0, expected an integer from 1"),
    ({"window": "20"}, "window is '20', expected an integer from 0"),
    ({"window": 0, "guesses": 0}, "window and guesses are both 0"),
    ({"phrase_length": 2}, "phrase_length is 2, expected an integer from 3"),
    ({"branches": -1}, "branches is -1, expected an integer from 0"),
    ({"guesses": 90}, r"guesses \* \(phrase_length - 1\) is 274, expected at most 256"),
    ({"gamma": 250}, r"gamma \+ branches .* is 259, expected at most 256"),
    ({"gamma": 12, "max_forwards": 13}, "max_forwards is 13, expected an integer 1 to gamma"),
    ({"harvest_trunk": 1}, "harvest_trunk is 1, expected true or false"),
    ({"scope": "isolated"}, r"scope is 'isolated', expected one of \['shared', 'request'\]"),
    ({"scope": "request", "pool_file": "p"}, "pool_file is given with scope 'request'"),
    ({"pool_file": "/no/such/folder/p"}, "expected a file in a directory that exists"),
    ({"budget_share": 2}, "budget_share is 2, expected a number above 0, at most 1"),
]
BAD_OPTIONS_OF_TREES_ALONG_A_TRUNK = [
    ({"gamma": 17}, "gamma is 17, expected an integer 1 to 16"),
    ({"window": 3}, "unknown key 'window', expected any of"),
    ({"preset": "dynamic"}, r"preset is 'dynamic', expected one of \['paper'\]"),
    ({"tree": "paper-80"}, "tree is 'paper-80', expected 'dynamic'"),
    ({"k": 2}, "k is 2, expected at least the 3 choices of a draft model"),
]
BAD_TABLES = [
    ([[1, 4, 81]], "has 81 nodes, expected at most the 80 that a tree has"),
    ([["1", 4, 8]], r"is \[\['1', 4, 8\]\], expected a list of \[first batch size, last"),
    ([[1, 4, True]], "expected a list of"),
    ([[1, 4]], "expected a list of"),
    ([], r"is \[\], expected a list of"),
    ({}, "is {}, expected a list of"),
    ([[2, 4, 8]], "The first batch-size range must start at 1"),
    ([[1, 4, 8], [3, 5, 4]], "Batch-size ranges must be non-overlapping"),
]
NO_CONFIGURATIONS = [
    ([], r"got \[\], expected an object, such as {\"method\": \"token_recycling\"}"),
    ([{"method": "token_recycling"}], r"got \[{'method': .*\], expected an object"),
    (0, "got 0, expected an object"),
    ("token_recycling", "got 'token_recycling', expected an object"),
    ({"method": ["token_recycling"]}, r"method is \['token_recycling'\], expected a name"),
    ({"method": 7}, "method is 7, expected a name"),
    ({"method": "ouroboros"}, "'model' is missing"),
]
NEARLY_OURS = {
    "token_recycling": ("token-recycling", "Token_Recycling", "tokenrecycling", "recycling"),
    "ouroboros": ("Ouroboros", "ouroborus"),
}
# Of a draft model, whose ranks are to be those of the target.
ONE_RANK = {"model": TARGET, "draft_tensor_parallel_size": 1}
FEWER_RANKS = "draft_tensor_parallel_size: got 1, expected none or that of the target, 2"
TWO_RANKS = {"tensor_parallel_size": 2}
EXPERTS = {"hf_overrides": {"num_local_experts": 4}}
OTHERS = [
    (TOKEN_RECYCLING, {"worker_cls": "a.B"}, "--worker-cls: got 'a.B', expected none"),
    (TOKEN_RECYCLING, {"scheduler_cls": "a.B"}, "--scheduler-cls: got 'a.B'"),
    (GROWN | {"num_speculative_tokens": 7}, {"spec_tokens": 8}, "--spec-tokens is given and 'num_"),
    (PAPER, {"max_model_len": 6}, "expected less than --max-model-len 6"),
    (OUROBOROS | {"window": 20, "guesses": 20}, SMALL_STEP, "64, expected at least the 104 rows"),
    (TRUNK | ONE_RANK, TWO_RANKS, FEWER_RANKS),
    (PUBLISHED | ONE_RANK, TWO_RANKS, FEWER_RANKS),
    pytest.param(HOSTED | {"trunk": HOSTED["trunk"] | ONE_RANK}, TWO_RANKS, FEWER_RANKS,
                 id="vLLM's trunk on fewer ranks"),
    (TOKEN_RECYCLING, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    (TOKEN_RECYCLING, {"async_scheduling": True}, "--async-scheduling"),
    (TOKEN_RECYCLING, {"convert": "embed"}, "--runner pooling"),
    (TOKEN_RECYCLING, EXPERTS | {"data_parallel_size": 2},
     "--data-parallel-size above 1 with a mixture-of-experts model"),
    (TOKEN_RECYCLING, EXPERTS | TWO_RANKS | {"enable_expert_parallel": True},
     "--enable-expert-parallel on several ranks on a CPU"),
    (TOKEN_RECYCLING, {"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 on a CPU"),
    # vLLM 0.33 has words of its own.
    (TOKEN_RECYCLING, {"kv_cache_dtype": "float16"}, 'float16 on a CPU|float16" is incompatible'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "flags", "message"),
    [
        *((TOKEN_RECYCLING | options, {}, message) for options, message in BAD_OPTIONS),
        *((OUROBOROS | case[0], {}, case[1]) for case in BAD_OPTIONS_OF_OUROBOROS_AS_PUBLISHED),
        *((TRUNK | case[0], {}, case[1]) for case in BAD_OPTIONS_OF_TREES_ALONG_A_TRUNK),
        *((TOKEN_RECYCLING | {TABLE: case[0]}, {}, f"{TABLE}.*{case[1]}") for case in BAD_TABLES),
        *((case[0], {}, f"config( of ouroboros)?: {case[1]}") for case in NO_CONFIGURATIONS),
        *(
            ({"method": given}, {}, f"method is '{given}', did you mean '{name}'")
            for name in NEARLY_OURS
            for given in NEARLY_OURS[name]
        ),
        *OTHERS,
    ],
)
def test_what_is_refused(given, flags, message):
    arguments = EngineArgs(TARGET, dtype="float32", speculative_config=given, **flags)
    with pytest.raises((NotImplementedError, ValueError), match=message) as refused:
        arguments.create_engine_config()
    if not isinstance(refused.value, ValidationError):  # which is vLLM's own
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < LINE


def test_keys_of_a_trunk_reach_vllm():
    given = {"moe_backend": "triton", "draft-tensor-parallel-size": 1, "revision": "1"}
    trunk = HOSTED["trunk"] | FIXED | given | {"draft_load_config": {"load_format": "dummy"}}
    config = make_config({"trunk": trunk | {"model": Path(TRUNK["model"])}}).speculative_config
    assert (config.model, config.moe_backend, config.revision) == (TRUNK["model"], "triton", "1")
    assert config.draft_tensor_parallel_size == 1
    assert config.draft_load_config.load_format == "dummy"


def test_no_method_of_vllm_is_nearly_ours():
    flags = dict.fromkeys(("spec_method", "spec_model", "spec_tokens"))
    names = get_args(SpeculativeMethod)
    assert "ngram" in names
    for name in (*names, "xyz", "", None):
        engine_args = SimpleNamespace(speculative_config={"method": name}, **flags)
        assert given_keys(engine_args, METHODS) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_position_embeddings": 1024}, "--max-model-len: got 2048, expected at most the 1024"),
        ({"vocab_size": 4000}, "vocab"),
    ],
)
def test_a_draft_model_that_does_not_fit(changed, message, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(OUROBOROS["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=message):
        make_config(OUROBOROS | {"model": str(folder)})


@pytest.mark.parametrize(
    "path", ["eagle-cluster/draft", "llama-eagle3", "DFlash-1b", "dspark_draft"]
)
def test_words_of_methods_in_the_path_of_a_draft_model(path, tmp_path):
    link = tmp_path / path
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(OUROBOROS["model"])
    message = (
        f"model is '{link}', which vLLM takes for one of its method .*: rename it or link to it$"
    )
    with pytest.raises(ValueError, match=message):
        make_config(OUROBOROS | {"model": str(link)})


def test_an_architecture_that_vllm_drafts_otherwise_is_refused():
    config = make_config(OUROBOROS)
    config.speculative_config.method = "mtp"
    with pytest.raises(ValueError, match="takes for one of its method 'mtp', expected an ordinary"):
        engine_config.settle(config)


def test_bad_tree_file(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"format": "vllm_recycle.tree/1", "nodes": [[0, 0], [5, 0]]}))
    with pytest.raises(ValueError, match="node 1: parent row 5 has not come before it"):
        make_config({"tree": str(path)})
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=f"tree file {path}: not JSON: nested too deep"):
        make_config({"tree": str(path)})


def test_null_says_nothing_and_a_path_may_be_one(tmp_path):
    plain = options_of()
    null = dict.fromkeys(plain.keys("token_recycling"))
    assert options_of(**null) == plain
    assert options_of(matrix_file=tmp_path / "matrix").state_file == str(tmp_path / "matrix")
