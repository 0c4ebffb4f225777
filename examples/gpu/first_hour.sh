#!/usr/bin/env bash
# The first hour on a GPU: whether all is right there, what it takes, and which estimates held.
#
#     examples/gpu/first_hour.sh FOLDER [PART...]    all parts: some 80 minutes at most
#     examples/gpu/first_hour.sh FOLDER --smoke      without a GPU, that everything runs
#
# Needs this package in a checkout, beside vLLM and pytest; or PyTorch, pytest and a kit of vLLM in
# `.kit` (make_kit.py). The cheapest that can be wrong comes first; what fails does not keep the
# rest from running. FOLDER has reports in JSON, a profile of a step for chrome://tracing, a log of
# each part, and the verdict in words. Parts, in this order:
#
#     operators  vLLM's compiled operators against torch; versions
#     twins      our kernels against their references
#     engine     the engine that users get by default, against plain vLLM
#     step_time  a step with trees over a plain one
#     model      a model of the size of Llama-3-8B, derived from a small one: 15 GB of disk
#     peers      tokens per second of that model: without speculation, ngram_gpu and ours
#     kernels    each kernel, beside the machine's limits
#     engines    all other kinds of engines, against plain vLLM
set -u
[ $# -ge 1 ] || { sed -n '2,20s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$1 smoke=
shift
if [ "${1:-}" = --smoke ]; then smoke=1; shift; fi
parts="operators twins engine step_time model peers kernels engines"
for name in "$@"; do
    [[ " $parts " == *" $name "* ]] || { echo "$name is no part; parts: $parts" >&2; exit 2; }
done
chosen=" ${*:-$parts} "
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python3}

unpack() {
    local archive site tools
    for archive in .kit/*.tar.xz; do
        site=$PWD/${archive%.tar.xz}
        [ -f "$archive" ] || { echo "no vLLM is installed, and no kit is in .kit" >&2; exit 2; }
        if [ "$archive" -nt "$site" ]; then
            rm -rf "$site" "$site.new"
            "$python" -m tarfile --extract "$archive" "$site.new" || exit
            touch "$site.new" && mv "$site.new" "$site"
        fi
        if [ -d "$site/triton" ]; then  # without CUDA's tools, which the machine's Triton has
            tools=$("$python" -c 'import triton.backends.nvidia as one; print(*one.__path__)')/bin
            ln -sfn "$tools" "$site/triton/backends/nvidia/bin"
            # PyTorch's own launcher is for the Triton that it was made with.
            export TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER=0
        fi
        export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
    done
    export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
}

part() {  # a name, the most minutes, and a command
    local name=$1 minutes=$2 start=$SECONDS
    shift 2
    [[ $chosen == *" $name "* ]] || return
    timeout --kill-after 10 "${minutes}m" "$@" >"$folder/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - start)) s"
}

tests() {  # the same, of pytest; a test that hangs shows where
    local name=$1 minutes=$2
    shift 2
    part "$name" "$minutes" "$python" -m pytest -q -rP -o faulthandler_timeout=120 \
        --junitxml "$folder/$name.xml" ${smoke:+--collect-only} "$@"
}

small=examples/models/smollm2-135m-instruct chat=--chat
[ -d $small ] && [ -z "$smoke" ] || small=examples/models/target chat=
if [ -n "$smoke" ]; then
    steps=(--smoke --only "plain,tree-8,grown-8") model=$small ngram=ngram
    load=(--num-prompts 4 --max-tokens 8 --dtype float32 --concurrency "1,4" --repeats 1
        --engine-args '{"enforce_eager": true}')
else
    steps=(--context 2048 --batch "1,8,64" --rows "2,16,64" --repeats 1
        --only "plain,grown-2,grown-16,grown-64") model=$small-wide ngram=ngram_gpu
    load=(--num-prompts 112 --fresh-prompts --max-tokens 128 --ignore-eos --dtype bfloat16
        --concurrency "1,4,16" --repeats 2 --max-engines 1
        --engine-args '{"kv_cache_memory_bytes": 4294967296}')
fi
lookup='{"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4'
"$python" -c 'import importlib.metadata as one; one.version("vllm")' 2>/dev/null || unpack
nvidia-smi >"$folder/nvidia-smi.txt" 2>&1
part operators 4 "$python" -P examples/gpu/operators.py "$folder/operators.json"
tests twins 10 -n 8 -m "not slow" -o timeout=300 -o timeout_method=thread \
    tests/kernels/triton/test_*.py
tests engine 8 -m gpu -k grown tests/integration/cuda
part step_time 20 "$python" examples/gpu/step_time.py --profile --json "$folder/step_time.json" \
    "${steps[@]}"
[ "$model" = $small ] ||
    part model 5 "$python" examples/models/derive_wide.py --model $small --output $model
part peers 10 "$python" -m vllm_recycle bench --model "$model" $chat "${load[@]}" \
    --prompts examples/prompts/spec_bench.jsonl --methods none,ngram_gpu,token_recycling \
    --speculative-config "ngram_gpu=$lookup, \"method\": \"$ngram\"}" --json "$folder/peers.json"
part kernels 10 "$python" examples/gpu/kernels.py --json "$folder/kernels.json" ${smoke:+--smoke}
tests engines 16 -m gpu -k "not grown" tests/integration/cuda
"$python" examples/gpu/verdict.py "$folder"
