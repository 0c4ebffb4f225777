"""Train an EAGLE head for SmolLM2-135M-Instruct on text that the model itself writes.

    python examples/models/train_head.py            # some hour on two cores

The chat template is opened, and the model writes a question and an answer, with seeds. Then one
layer learns to predict the next hidden state of the target from the hidden state before it and the
next token (EAGLE, arXiv 2401.15077, section 4.2); the target's own output layer makes tokens of it.
The head is in the format of vLLM's checkpoints: `{"method": "eagle", "model": FOLDER}`. The derived
target of 150 layers (`make pair`) has the same hidden states, so the same head serves it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

HERE = Path(__file__).parent
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
LENGTH = 256  # tokens of a training text
BATCH = 16
NOISE = 0.2  # of hidden states, in parts of their standard deviation
PLACES = 3  # of a chain
ROWS = 768  # of a batch whose logits are compared, at each place


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    texts = options.output.with_suffix(".texts.json")
    if not texts.exists():
        texts.write_text(json.dumps(write_texts(options)))
    rows = json.loads(texts.read_text())
    print(f"{len(rows)} texts, {sum(map(len, rows)):,} tokens", flush=True)
    head = train(options, rows)
    write(options, head)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE / "smollm2-135m-instruct")
    parser.add_argument("--output", type=Path, default=HERE / "smollm2-135m-eagle")
    parser.add_argument("--tokens", type=int, default=300_000, help="of text to train on")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def write_texts(options: argparse.Namespace) -> list[list[int]]:
    """Conversations of one question and one answer, as token ids."""
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    opening = tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    between = tokenizer.encode("\n<|im_start|>assistant\n")
    llm = LLM(
        str(options.model),
        dtype="bfloat16",
        max_model_len=2 * LENGTH,
        max_num_seqs=64,
        kv_cache_memory_bytes=2 << 30,
        speculative_config={"method": "token_recycling"},
    )

    def say(prompts: list[list[int]], first_seed: int, **given: float) -> list[list[int]]:
        params = [
            SamplingParams(seed=first_seed + i, stop_token_ids=[end], **given)
            for i in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    rows: list[list[int]] = []
    total, seed = 0, options.seed
    while total < options.tokens:
        asked = say([opening] * 256, seed, temperature=1.0, top_p=0.95, max_tokens=96)
        prompts = [[*opening, *question, *between] for question in asked if question[-1:] == [end]]
        # Half of the answers greedy, half sampled.
        answers = say(prompts[::2], seed, temperature=0.0, max_tokens=LENGTH)
        answers += say(prompts[1::2], seed, temperature=0.8, max_tokens=LENGTH)
        made = [
            [*prompt, *answer][: LENGTH + 1]
            for prompt, answer in zip(prompts[::2] + prompts[1::2], answers, strict=True)
        ]
        rows += made
        total += sum(map(len, made))
        seed += 256
    return rows


class Head(torch.nn.Module):
    """One layer of the target's kind behind an embedding and a hidden state."""

    def __init__(self, config: AutoConfig) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = torch.nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, n, hidden] of the next tokens.

        Args:
            embedded: [batch, n, hidden], of the next token at each place.
            states: [batch, n, hidden], of the target at each place.

        """
        hidden = self.fc(torch.cat((embedded, states), dim=-1))
        places = torch.arange(hidden.shape[1])[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, places))


class Row(NamedTuple):
    """A text as the target sees it.

    Attributes:
        embedded: bfloat16 [tokens, hidden].
        states: bfloat16 [tokens, hidden], behind the last norm.

    """

    embedded: torch.Tensor
    states: torch.Tensor


@torch.no_grad()
def read(target: Any, rows: list[list[int]]) -> list[Row]:
    """What the target makes of each text, once for all epochs."""
    read = []
    for token_ids in rows:
        given = torch.tensor([token_ids])
        read.append(Row(target.model.embed_tokens(given)[0], target.model(given)[0][0]))
    return read


def train(options: argparse.Namespace, rows: list[list[int]]) -> Head:
    """The head that predicts the target best."""
    torch.manual_seed(options.seed)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    started = time.monotonic()
    texts = read(target, rows)
    print(f"read in {(time.monotonic() - started) / 60:.0f} min", flush=True)
    head, to_logits = Head(target.config), target.lm_head.weight
    with torch.no_grad():  # at first it says again what the target said
        size = target.config.hidden_size
        head.fc.weight[:, size:] += torch.eye(size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95))
    kept, held_out = texts[: -2 * BATCH], texts[-2 * BATCH :]
    in_epoch = len(kept) // BATCH
    steps = options.epochs * in_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=steps + 1)
    started = time.monotonic()
    for step in range(steps):
        if step % in_epoch == 0:
            order = torch.randperm(len(kept)).tolist()
        first = step % in_epoch * BATCH
        loss, _ = losses(head, to_logits, [kept[i] for i in order[first : first + BATCH]], NOISE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            with torch.no_grad():
                _, right = losses(head, to_logits, held_out, 0.0)
            minutes, shown = (time.monotonic() - started) / 60, [f"{one:.3f}" for one in right]
            print(f"{step}/{steps}, {minutes:.0f} min: {loss:.3f}, right {shown}", flush=True)
    return head


def losses(
    head: Head, to_logits: torch.Tensor, rows: list[Row], noise: float
) -> tuple[torch.Tensor, list[float]]:
    """What is to be made small, and how often the best token is the target's, by place of a chain.

    Behind the first place the head reads its own prediction, as it does when it drafts.
    """
    embedded, states = (
        torch.nn.utils.rnn.pad_sequence([*of_rows], batch_first=True).float()
        for of_rows in zip(*rows, strict=True)
    )
    lengths = torch.tensor([len(row.states) for row in rows])
    places = torch.arange(states.shape[1] - 1)
    given, total, right = states[:, :-1], torch.zeros(()), []
    given = given + noise * (torch.rand_like(given) - 0.5) * given.std()
    for place in range(PLACES):
        with torch.autocast("cpu", torch.bfloat16):
            predicted = head(embedded[:, 1:], given)
        real = ((places + 1 < lengths[:, None]) & (places >= place)).nonzero()
        some = real[torch.randperm(len(real))[:ROWS]].unbind(1)
        wanted = states[:, 1:][some]
        said = F.linear(wanted.bfloat16(), to_logits).float()
        logits = F.linear(predicted[some].bfloat16(), to_logits).float()
        loss = F.cross_entropy(logits, said.softmax(dim=-1))
        loss = loss + 0.5 * F.smooth_l1_loss(predicted[some].float(), wanted)
        total = total + loss * 0.8**place
        right.append(float((logits.argmax(dim=-1) == said.argmax(dim=-1)).float().mean()))
        # What is predicted for a place is what the next round reads there.
        given = torch.cat((given[:, :1], predicted[:, :-1].float()), dim=1)
    return total, right


def write(options: argparse.Namespace, head: Head) -> None:
    """The head as vLLM reads it."""
    options.output.mkdir(exist_ok=True)
    config = json.loads((options.model / "config.json").read_text())
    config |= {"num_hidden_layers": 1}
    (options.output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {"fc.weight": head.fc.weight}
    weights |= {f"layers.0.{name}": value for name, value in head.layer.named_parameters()}
    halves = {name: value.detach().bfloat16().contiguous() for name, value in weights.items()}
    save_file(halves, options.output / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.model / name, options.output)
    size = sum(value.nbytes for value in halves.values())
    print(f"{options.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
