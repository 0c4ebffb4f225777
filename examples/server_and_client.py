"""The OpenAI-compatible server with Token Recycling or Ouroboros, and a client of it.

    python examples/server_and_client.py
    python examples/server_and_client.py --draft-model examples/models/draft
    python examples/server_and_client.py --model DIR --max-tokens 128

Starts `vllm serve` on a free port, waits for it, sends a completion and a streamed chat through
the `openai` package, reads the server's counters and shuts it down.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

EXAMPLES = Path(__file__).parent
# The small model knows no chat format: its questions and answers serve as one.
CHAT_TEMPLATE = "{% for m in messages %}Question: {{ m.content }}\n{% endfor %}Answer:"
QUESTION = "A baker makes 3 trays of 12 rolls and sells 20 rolls. How many rolls are left?"
CODE = "import os\n\n\nclass Config:\n    def __init__(self, path, name):"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--draft-model", help="draft with this model, by Ouroboros")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    method = {"method": "token_recycling"}
    if args.draft_model:
        method = {"method": "ouroboros", "model": args.draft_model}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", args.model, "--served-model-name=target", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--chat-template={CHAT_TEMPLATE}", "--max-num-seqs=8"]
    # By default vLLM takes most of the memory, and kills its engine while that shuts down.
    command += ["--kv-cache-memory-bytes=268435456", "--shutdown-timeout=10"]
    command += ["--speculative-config", json.dumps(method)]
    server = subprocess.Popen(command)
    try:
        base = f"http://127.0.0.1:{port}"
        wait(server, f"{base}/health")
        client = OpenAI(base_url=f"{base}/v1", api_key="none")
        options = {"model": "target", "max_tokens": args.max_tokens, "temperature": 0}
        ask(client, options)
        metrics = urllib.request.urlopen(f"{base}/metrics").read().decode()
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            print(*re.findall(f"^vllm:spec_decode_num_{name}_total.*", metrics, re.MULTILINE))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    print(f"the server ended with status {server.returncode}")


def ask(client: OpenAI, options: dict[str, object]) -> None:
    """Print a completion, and a chat's answer as it comes."""
    print(CODE + client.completions.create(prompt=CODE, **options).choices[0].text)
    messages = [{"role": "user", "content": QUESTION}]
    for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def wait(server: subprocess.Popen, url: str) -> None:
    """Return when the server answers; raise where it ends before."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:  # not there yet
            time.sleep(1)
    raise RuntimeError(f"vllm serve ended with status {server.returncode}")


if __name__ == "__main__":
    main()
