"""Train an EAGLE head for a chat model of Llama's kind, on text that the model itself writes.

    python examples/models/train_head.py        # SmolLM2-135M-Instruct; two hours on two cores

The chat template is opened, and the model writes a question and an answer, with seeds. Then one
layer learns the next hidden state of the target from the hidden state before it and the next token
(EAGLE, arXiv 2401.15077, section 4.2). The target's own output layer makes tokens of it. vLLM reads
the head by `{"method": "eagle", "model": FOLDER}`.

The texts are kept beside the head, in OUTPUT.texts.json: a run that was stopped goes on there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

HERE = Path(__file__).parent
QUESTION, LENGTH = 96, 256  # the most tokens of a question, and of an answer or a text
ASKED = 256  # questions that are asked at a time
BATCH = 16  # texts of a training step
PLACES = 3  # of a chain, in training
ROWS = 320  # of a step whose logits are compared, at each place
NOISE = 0.2  # of hidden states, in parts of their standard deviation


def main(*arguments: str) -> None:
    options = parse(arguments or None)
    texts = write_texts(options, options.output.with_suffix(".texts.json"))
    print(f"{len(texts)} texts, {sum(map(len, texts)):,} tokens", flush=True)
    write(options, train(options, texts))


def parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE / "smollm2-135m-instruct")
    parser.add_argument("--output", type=Path, default=HERE / "smollm2-135m-eagle")
    parser.add_argument("--tokens", type=int, default=300_000, help="of text to train on")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def write_texts(options: argparse.Namespace, path: Path) -> list[list[int]]:
    """Conversations of one question and one answer, as token ids; those of the file come first."""
    batches: list[list[list[int]]] = json.loads(path.read_text()) if path.exists() else []
    if count(batches) >= options.tokens:
        return [*itertools.chain(*batches)]
    from vllm import LLM, SamplingParams

    opening, between, end = parts_of_template(options.model)
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

    while count(batches) < options.tokens:
        seed = options.seed + ASKED * len(batches)
        asked = say([opening] * ASKED, seed, temperature=1.0, top_p=0.95, max_tokens=QUESTION)
        prompts = [[*opening, *question, *between] for question in asked if question[-1:] == [end]]
        # Half of the answers greedy, half sampled.
        answers = say(prompts[::2], seed, temperature=0.0, max_tokens=LENGTH)
        answers += say(prompts[1::2], seed, temperature=0.8, max_tokens=LENGTH)
        pairs = zip(prompts[::2] + prompts[1::2], answers, strict=True)
        batches.append([[*prompt, *answer][: LENGTH + 1] for prompt, answer in pairs])
        path.write_text(json.dumps(batches))
    return [*itertools.chain(*batches)]


def count(batches: list[list[list[int]]]) -> int:
    return sum(len(text) for texts in batches for text in texts)


def parts_of_template(model: Path) -> tuple[list[int], list[int], int]:
    """The chat template before a question, between its end and the answer, and the end's token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [{"role": "user", "content": "<Q>"}, {"role": "assistant", "content": "<A>"}]
    opening, rest = tokenizer.apply_chat_template(turns, tokenize=False).split("<Q>")
    (end, *between), (other, *_) = (
        tokenizer.encode(part, add_special_tokens=False) for part in rest.split("<A>")
    )
    if end != other:
        raise SystemExit(f"{model}: its template ends questions and answers by two tokens")
    return tokenizer.encode(opening, add_special_tokens=False), between, end


class Head(torch.nn.Module):
    """One layer of the target's kind behind an embedding and a hidden state."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = torch.nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        with torch.no_grad():  # begins with the last hidden state
            self.fc.weight[:, size:] += torch.eye(size)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the next tokens, [batch, n, hidden].

        Args:
            embedded: [batch, n, hidden], of the next token at each place.
            states: [batch, n, hidden], of the target at each place.

        """
        hidden = self.fc(torch.cat((embedded, states), dim=-1))
        places = torch.arange(hidden.shape[1])[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, places))


class Read(NamedTuple):
    """A text as the target read it.

    Attributes:
        embedded: bfloat16 [tokens, hidden].
        states: bfloat16 [tokens, hidden], behind the last norm.

    """

    embedded: torch.Tensor
    states: torch.Tensor


@torch.no_grad()
def read(target: Any, texts: list[list[int]]) -> list[Read]:
    """Let the target read each text, once for all epochs."""
    by_length, found = sorted(range(len(texts)), key=lambda i: len(texts[i])), {}
    for first in range(0, len(texts), BATCH):
        some = by_length[first : first + BATCH]
        rows = [torch.tensor(texts[i]) for i in some]
        given = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # nothing looks ahead
        embedded, states = target.model.embed_tokens(given), target.model(given)[0]
        for i, *values in zip(some, embedded, states, strict=True):
            found[i] = Read(*(value[: len(texts[i])].clone() for value in values))
    return [found[i] for i in range(len(texts))]


def train(options: argparse.Namespace, token_ids: list[list[int]]) -> Head:
    """A head that follows the target."""
    torch.manual_seed(options.seed)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    started = time.monotonic()
    texts = read(target, token_ids)
    print(f"read in {(time.monotonic() - started) / 60:.0f} min", flush=True)
    head, to_logits = Head(target.config), target.lm_head.weight
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
        some = [kept[i] for i in order[first : first + BATCH]]
        chain = enumerate(compared(head, to_logits, some, NOISE))
        loss = sum(0.8**place * loss_of(*values) for place, values in chain)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            with torch.no_grad():
                chain = compared(head, to_logits, held_out, 0.0)
                shown = [f"{agreement(*logits):.3f}" for *_, logits in chain]
            minutes = (time.monotonic() - started) / 60
            print(f"{step}/{steps}, {minutes:.0f} min: {loss:.3f}, right {shown}", flush=True)
    return head


def loss_of(
    states: torch.Tensor, wanted: torch.Tensor, logits: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The loss at a place of a chain, see `compared`."""
    said, expected = logits
    loss = F.cross_entropy(said, expected.softmax(dim=-1))
    return loss + 0.5 * F.smooth_l1_loss(states, wanted)


def agreement(said: torch.Tensor, expected: torch.Tensor) -> float:
    """How often the best tokens are the same."""
    return float((said.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean())


def compared(
    head: Head, to_logits: torch.Tensor, texts: Sequence[Read], noise: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """By place of a chain: hidden states and logits of some rows, the head's and the target's.

    Behind the first place the head reads its own prediction, as it does when it drafts.
    """
    embedded, states = (
        torch.nn.utils.rnn.pad_sequence([*values], batch_first=True).float()
        for values in zip(*texts, strict=True)
    )
    lengths = torch.tensor([len(text.states) for text in texts])
    places = torch.arange(states.shape[1] - 1)
    given = states[:, :-1]
    given = given + noise * (torch.rand_like(given) - 0.5) * given.std()
    for place in range(PLACES):
        with torch.autocast("cpu", torch.bfloat16):
            predicted = head(embedded[:, 1:], given)
        real = ((places + 1 < lengths[:, None]) & (places >= place)).nonzero()
        some = real[torch.randperm(len(real))[:ROWS]].unbind(1)
        wanted = states[:, 1:][some]
        both = (F.linear(rows.bfloat16(), to_logits).float() for rows in (predicted[some], wanted))
        yield predicted[some].float(), wanted, tuple(both)
        # The prediction for a place is what the next round reads there.
        given = torch.cat((given[:, :1], predicted[:, :-1].float()), dim=1)


def write(options: argparse.Namespace, head: Head) -> None:
    """Write the head in the format of vLLM's checkpoints."""
    options.output.mkdir(exist_ok=True)
    config = json.loads((options.model / "config.json").read_text())
    (options.output / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 1}, indent=1) + "\n"
    )
    weights = {"fc.weight": head.fc.weight}
    weights |= {f"layers.0.{name}": value for name, value in head.layer.named_parameters()}
    halves = {name: value.detach().bfloat16().contiguous() for name, value in weights.items()}
    save_file(halves, options.output / "model.safetensors")
    size = sum(value.nbytes for value in halves.values())
    print(f"{options.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
