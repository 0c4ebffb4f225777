"""Train a target and a draft Llama from scratch, as examples/models was trained.

The text is what lies on the machine: Python source (the standard library of the
running interpreter and the installed packages among `PACKAGES`, each file a
document) and, with ``--gsm8k``, the GSM8K train split. Both models share one
byte-level BPE tokenizer; both directories load with transformers and vLLM. This
is not part of `vllm_recycle` and imports nothing of it. The recipe is explained
in examples/models/README.md.

The whole training, about an hour on two CPU cores::

    python examples/models/train_pair.py --gsm8k train.jsonl --output trained_pair

A smoke run, one to two minutes on one core, too short to learn anything::

    python examples/models/train_pair.py --minutes-target 0.5 --minutes-draft 0.2 \
        --max-megabytes 2 --output trained_pair_smoke

The last line on stdout is one JSON object: steps, loss and minutes of both models.
Everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import random
import re
import sysconfig
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_pair")

PACKAGES = (
    *("numpy", "sympy", "networkx", "requests", "click", "jinja2", "pydantic", "fastapi"),
    *("starlette", "httpx", "rich", "aiohttp", "transformers", "torch", "ray"),
)
PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2
BOS_ID, EOS_ID = 1, 2
VOCAB_SIZE = 4096
CONTEXT, BATCH = 512, 16
SEED = 0
GSM8K_REPEATS = 4  # in the training text
TOKENIZER_GSM8K_REPEATS = 2
TOKENIZER_FILES = 1500
PEAK_LR, FINAL_LR_RATIO, WARMUP_STEPS = 2e-3, 0.05, 100
LOSS_WINDOW = 50  # steps the reported running loss is averaged over
# (layers, hidden, heads, key-value heads, MLP); heads are 64 wide in both
SHAPES = {"target": (6, 256, 4, 2, 704), "draft": (2, 192, 3, 1, 512)}


def llama_config(name: str) -> LlamaConfig:
    layers, hidden, heads, kv_heads, mlp = SHAPES[name]
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def gsm8k_documents(path: Path) -> list[str]:
    """Question and answer of every line of a published GSM8K file, calculator marks removed."""
    documents = []
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        item = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", item["answer"])
        documents.append(f"Question: {item['question']}\nAnswer: {answer}")
    return documents


def source_files() -> Iterator[Path]:
    """Python files of the standard library and of the packages that are installed; no tests."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            log.info("package %s is not installed: left out", package)
        else:
            roots.extend(Path(place) for place in spec.submodule_search_locations)
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
                yield path


def source_documents(max_megabytes: float, rng: random.Random) -> list[str]:
    """A random choice of whole source files, up to `max_megabytes` in all."""
    files = list(source_files())
    rng.shuffle(files)
    documents, left = [], max_megabytes * 1e6
    for path in files:
        size = path.stat().st_size
        if not 0 < size <= left:
            continue
        try:
            documents.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # a few files of the library declare another encoding
            continue
        left -= size
    return documents


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries; it adds neither <s> nor </s> by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (got := tokenizer.get_vocab_size()) != VOCAB_SIZE:
        raise ValueError(f"too little text: got a vocabulary of {got}, expected {VOCAB_SIZE}")
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents end to end, each between <s> and </s>, cut into [rows, CONTEXT] int16 ids."""
    tokenizer.encode_special_tokens = True  # a "</s>" in the text is text
    ids = array("h")
    for start in tqdm(range(0, len(documents), 64), desc="tokenize", unit="batch"):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 64]):
            ids.extend((BOS_ID, *encoding.ids, EOS_ID))
    rows = len(ids) // CONTEXT
    if rows < BATCH:
        raise ValueError(f"too little text: got {rows} rows of tokens, expected {BATCH} or more")
    return torch.frombuffer(ids, dtype=torch.int16)[: rows * CONTEXT].view(rows, CONTEXT)


def batches(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """[BATCH, CONTEXT] int64 without end, every row once an epoch, reshuffled between epochs."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            yield rows[order[start : start + BATCH]].long()


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by steps, cosine decay to FINAL_LR_RATIO by the share of the budget used."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    decay = FINAL_LR_RATIO + (1 - FINAL_LR_RATIO) * cosine
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * decay


def train(
    name: str, rows: torch.Tensor, *, minutes: float, steps: int | None
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """Train one model of `SHAPES` for `minutes` or, where `steps` is set, for that many steps.

    Returns the model and its steps, loss (nats a token, mean of the last LOSS_WINDOW steps) and
    minutes. At least one step is made.
    """
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Where a CPU has no instructions for it, bfloat16 is far slower than float32.
    has_bfloat16 = device.type == "cuda" or torch.backends.cpu.get_cpu_capability() != "AVX2"
    model = LlamaForCausalLM(llama_config(name)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    recent: deque[float] = deque(maxlen=LOSS_WINDOW)
    start, step, progress = time.perf_counter(), 0, 0.0
    bar = tqdm(total=100, desc=name, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}")
    for batch in batches(rows):
        lr = learning_rate(step, progress)
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids = batch.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        step += 1
        mean = sum(recent) / len(recent)
        spent = (time.perf_counter() - start) / 60
        progress = step / steps if steps else spent / minutes
        bar.set_postfix(step=step, loss=f"{mean:.3f}", lr=f"{lr:.1e}")
        bar.update(min(100 * progress, 100) - bar.n)
        if progress >= 1:
            break
    bar.close()
    return model, {"steps": step, "loss": round(mean, 4), "minutes": round(spent, 3)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="gets target/ and draft/")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K, as published")
    parser.add_argument("--max-megabytes", type=float, default=40, help="of Python source")
    parser.add_argument("--minutes-target", type=float, default=52)
    parser.add_argument("--minutes-draft", type=float, default=10)
    steps = "optimizer steps of the two models; replaces the minutes"
    parser.add_argument("--steps", type=int, nargs=2, metavar=("TARGET", "DRAFT"), help=steps)
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    steps = arguments.steps or (None, None)
    minutes = (arguments.minutes_target, arguments.minutes_draft)
    rng = random.Random(SEED)
    questions = gsm8k_documents(arguments.gsm8k) if arguments.gsm8k else []
    if arguments.gsm8k is None:
        log.info("no --gsm8k: training on Python source alone")
    sources = source_documents(arguments.max_megabytes, rng)
    tokenizer = train_tokenizer(questions * TOKENIZER_GSM8K_REPEATS + sources[:TOKENIZER_FILES])
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    shared = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    documents = questions * GSM8K_REPEATS + sources
    rng.shuffle(documents)
    rows = pack(tokenizer, documents)
    log.info("%d documents, %d tokens", len(documents), rows.numel())
    report: dict[str, object] = {"gsm8k_items": len(questions), "source_files": len(sources)}
    report["tokens"] = rows.numel()
    for name, own_minutes, own_steps in zip(SHAPES, minutes, steps, strict=True):
        model, result = train(name, rows, minutes=own_minutes, steps=own_steps)
        model.to(torch.bfloat16).save_pretrained(arguments.output / name)
        shared.save_pretrained(arguments.output / name)
        report[name] = result
    print(json.dumps(report))


if __name__ == "__main__":
    main()
