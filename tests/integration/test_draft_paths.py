"""Words in the path of a draft model that vLLM takes for methods of its own."""

from __future__ import annotations

import pytest
from engines import OUROBOROS, TARGET, counter, engine, generate, read_prompts
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_recycle.cli import main
from vllm_recycle.integration import config as engine_config

PATHS = ["eagle-cluster/draft", "llama-eagle3", "DFlash-1b", "dspark_draft"]


def make_config(model: object):
    config = {**OUROBOROS, "model": str(model)}
    return EngineArgs(TARGET, dtype="float32", speculative_config=config).create_engine_config()


@pytest.fixture
def link(tmp_path, request):
    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(OUROBOROS["model"])
    return path


@pytest.mark.parametrize("link", PATHS, indirect=True)
def test_a_folder_may_be_called_anything(link):
    spec = make_config(link).speculative_config
    draft = spec.draft_model_config
    assert spec.method == "draft_model"
    assert {spec.model, draft.model, draft.hf_config._name_or_path} == {str(link)}
    assert draft.hf_config.model_type == "llama"


@pytest.mark.parametrize("link", PATHS[:1], indirect=True)
def test_check_and_start_agree(link, capfd, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    config = f'{{"method": "ouroboros", "model": "{link}"}}'
    assert main(["check", TARGET, "--dtype", "float32", "--speculative-config", config]) == 0
    assert "with ouroboros" in capfd.readouterr().out
    with engine({**OUROBOROS, "model": str(link)}) as llm:
        assert llm.llm_engine.vllm_config.speculative_config.model == str(link)
        generate(llm, read_prompts(2), SamplingParams(temperature=0, max_tokens=16))
        assert counter(llm, "spec_decode_num_draft_tokens") > 0


def test_a_name_on_the_hub_is_refused_for_its_word():
    message = "model is 'org/llama-eagle3', which vLLM takes for one of its method 'eagle3'"
    with pytest.raises(ValueError, match=message):
        make_config("org/llama-eagle3")


def test_a_method_that_vllm_chose_by_the_architecture():
    config = make_config(OUROBOROS["model"])
    config.speculative_config.method = "mtp"
    with pytest.raises(ValueError, match="takes for one of its method 'mtp', expected an ordinary"):
        engine_config.finish(config)
