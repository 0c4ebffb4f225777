#!/usr/bin/env bash
# The first hour on a GPU: whether all is right there, what it takes, and which estimates held.
#
#     examples/gpu/first_hour.sh FOLDER            some 50 minutes on an H100
#     examples/gpu/first_hour.sh FOLDER --smoke    without a GPU, that everything runs
#
# Needs this package in a checkout, beside vLLM and pytest. The cheapest that can be wrong comes
# first; what fails does not keep the rest from running. FOLDER has reports in JSON, a profile of a
# step for chrome://tracing, a log of each part, and the verdict in words.
set -u
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$1 smoke=${2:-}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python}

part() {  # a name, the most minutes, and a command
    local name=$1 minutes=$2 start=$SECONDS
    shift 2
    timeout "${minutes}m" "$@" >"$folder/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - start)) s"
}

if [ -n "$smoke" ]; then
    tests=(--collect-only) steps=(--smoke --only "plain,tree-8,grown-8")
else
    tests=() steps=(--context 2048 --batch 1,8,64 --rows 2,16,64 --repeats 1
        --only "plain,grown-2,grown-16,grown-64")
fi
nvidia-smi >"$folder/nvidia-smi.txt" 2>&1
part twins 10 "$python" -m pytest -q tests/kernels/triton --junitxml "$folder/twins.xml" "${tests[@]}"
part engines 16 "$python" -m pytest -q -rP -m gpu tests/integration/cuda --junitxml "$folder/engines.xml" "${tests[@]}"
part kernels 10 "$python" examples/gpu/kernels.py --json "$folder/kernels.json" ${smoke:+--smoke}
part step_time 20 "$python" examples/gpu/step_time.py --profile --json "$folder/step_time.json" "${steps[@]}"
"$python" examples/gpu/verdict.py "$folder"
