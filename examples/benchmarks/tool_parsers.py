"""Which of vLLM's parsers stream tool calls or reasoning wrongly from steps of several tokens.

Texts as models write them (tool_parsers.json) go through vLLM's output processor in steps of n
tokens, and on to the parser: as vLLM hands them on, and as vllm_recycle does. What a client
receives is compared with plain decoding, one token a step.

    python examples/benchmarks/tool_parsers.py > examples/tool_parsers.md
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from tokenizers import AddedToken
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from vllm_recycle.integration.requests import streaming

EXAMPLES = Path(__file__).parents[1]
GIVEN = json.loads((EXAMPLES / "benchmarks" / "tool_parsers.json").read_text())
TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "target")
# Models have tokens of their own for these.
TOKENIZER.add_tokens([AddedToken(token, normalized=False) for token in GIVEN["tokens"]])
ALL = 10**6
# Tokens of a step; the first one, which is the prompt's, has one. The last: all pile up.
CUTS = (1, 2, 3, 5, 7, 12, 20, ALL)
PROMPT = [1, 5, 6]
TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": TYPES}}
THINKING = {"thinking": True, "enable_thinking": True}
NOT_RUN = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "hf": "goes by a template in the checkpoint",
    "openai": "goes by the vocabulary of GPT-OSS",
    "olmo3 (reasoning)": "goes by the vocabulary of OLMo 3",
    "openai_gptoss": "goes by the vocabulary of GPT-OSS",
    **dict.fromkeys(("beam", "muse", "musespark1x", "step5"), "new in vLLM 0.33"),
}
HEAD = """# Tool calls and reasoning, streamed

vLLM's parsers read a stream delta by delta. Where a step brings several tokens, as with every
speculative method, some of them lose or repeat arguments. Below are the parsers of vLLM {version}
with which a client receives something else than with plain decoding, one token a step. `differs
at`: tokens a step, for a text of one call / of two calls; `all`: all tokens in one delta.

**With `vllm_recycle` {right} of {count} streams are those of plain decoding**, because the tokens
of a step go to a parser one by one. Where plain decoding is wrong, as with jamba and functiongemma,
so are they. Made by `python examples/benchmarks/tool_parsers.py`.

| parser | of | differs at | plain decoding | instead, for example |
| --- | --- | --- | --- | --- |"""


class Received(NamedTuple):
    """What a client has at the end of a stream."""

    calls: list[tuple[str, str]]  # name and arguments
    reasoning: str
    content: str


def tokens(text: str) -> list[int]:
    """Of an answer, with its end."""
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def steps(
    token_ids: list[int], cut: int, *, by_token: bool, **params: Any
) -> Iterator[RequestOutput]:
    """What vLLM's server is given of a text that an engine makes `cut` tokens a step of.

    With `by_token`, deltas can be split by token. `params` are sampling parameters.
    """
    processor = OutputProcessor(TOKENIZER, log_stats=False)
    given = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
    request = EngineCoreRequest(
        "0", PROMPT, None, given, None, 0.0, None, None, None, external_req_id="0"
    )
    processor.add_request(request, None)
    state = processor.request_states["0"]
    plain = state.detokenizer
    if isinstance(plain, streaming.Detokenizer):  # an engine of this process has ours in its place
        plain = plain._detokenizer
    state.detokenizer = streaming.Detokenizer(plain) if by_token else plain
    for start in range(0 if cut == ALL else 1 - cut, len(token_ids), cut):
        new = token_ids[max(start, 0) : start + cut]
        ends = FinishReason.STOP if start + cut >= len(token_ids) else None
        output = EngineCoreOutput("0", new, finish_reason=ends)
        yield from processor.process_outputs([output]).request_outputs


def deltas(
    kind: str, name: str, text: str, cut: int, *, by_token: bool, interval: int = 1
) -> Iterator[DeltaMessage | None]:
    """What a parser makes of each chunk of a text; `kind` is tool or reasoning."""
    made = ParserManager.get_parser(
        **{f"{kind}_parser_name": name}, enable_auto_tools=kind == "tool", model_name="target"
    )
    tools = [{"type": "function", "function": TOOL}] if kind == "tool" else None
    request: Any = ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], tools=tools, stream=True
    )
    parser = made(TOKENIZER, request.tools, chat_template_kwargs=THINKING)
    request = parser.adjust_request(request) or request
    params = {"skip_special_tokens": request.skip_special_tokens, "stream_interval": interval}
    results = steps(tokens(text), cut, by_token=by_token, **params)
    parse, parsers = type(parser).parse_delta, {}
    for chunk in (chunk for step in results for chunk in streaming.split(step, parsers, interval)):
        [output] = chunk.outputs
        yield streaming.parse_delta(
            parse,
            parser,
            delta_text=output.text,
            delta_token_ids=[*output.token_ids],
            request=request,
            prompt_token_ids=chunk.prompt_token_ids,
            finished=output.finish_reason is not None,
        )


def receive(
    kind: str, name: str, text: str, cut: int, *, by_token: bool, interval: int = 1
) -> Received:
    """What a client has of a text that was streamed so."""
    content, reasoning, calls = "", "", {}
    for delta in deltas(kind, name, text, cut, by_token=by_token, interval=interval):
        if delta is None:
            continue
        content += delta.content or ""
        reasoning += delta.reasoning or ""
        for call in delta.tool_calls or []:
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.function.name or ""
            name_and_arguments[1] += call.function.arguments or ""
    return Received([(name, arguments) for name, arguments in calls.values()], reasoning, content)


def differences(
    kind: str, name: str, text: str, *, by_token: bool, interval: int = 1
) -> dict[int, tuple[str, str]]:
    """By cut: what plain decoding gives, and what is received instead."""
    expected = receive(kind, name, text, 1, by_token=False)
    found = {}
    for cut in CUTS:
        try:
            received = receive(kind, name, text, cut, by_token=by_token, interval=interval)
        except AssertionError:  # a parser's own
            found[cut] = ("", "AssertionError")
            continue
        for said, instead in zip(expected, received, strict=True):
            if said != instead:
                found.setdefault(cut, (shown(said), shown(instead)))
    return found


def shown(received: str | list[tuple[str, str]]) -> str:
    if isinstance(received, str):
        return json.dumps(received, ensure_ascii=False)
    return " ".join(f"{name}({arguments})" for name, arguments in received) or "no call"


def cell(text: str) -> str:
    short = text if len(text) <= 80 else f"{text[:15]} ... {text[-60:]}"
    return f"`{short}`".replace("|", "\\|") if text else ""


def row(kind: str, name: str, found: list[dict[int, tuple[str, str]]]) -> str:
    cuts = [", ".join("all" if cut == ALL else str(cut) for cut in of) or "none" for of in found]
    said, instead = next(example for of in found for example in of.values())
    return f"| {name} | {kind} | {' / '.join(cuts)} | {cell(said)} | {cell(instead)} |"


def main() -> None:
    logging.disable(logging.ERROR)
    rows, lists, wrong, count = [], {}, [], 0
    for kind in ("tool", "reasoning"):
        for name, texts in GIVEN[f"{kind}_parsers"].items():
            found = [differences(kind, name, text, by_token=False) for text in texts]
            if any(found):
                rows.append(row(kind, name, found))
            else:
                lists.setdefault(f"The same at every cut, of {kind}", []).append(name)
            ours = [differences(kind, name, text, by_token=True) for text in texts]
            wrong += [(kind, name, cut) for of in ours for cut in of]
            count += len(CUTS) * len(texts)
    right = count - len(wrong)
    print(HEAD.format(version=vllm.__version__, right=right, count=count), *rows, sep="\n")
    lists["Not run"] = [f"{name} ({why})" for name, why in NOT_RUN.items()]
    for title, names in lists.items():
        lines = textwrap.wrap(f"{title}: {', '.join(names)}.", width=100, break_on_hyphens=False)
        print("", *lines, sep="\n")
    if wrong:
        raise SystemExit(f"with vllm_recycle these differ: {wrong}")


if __name__ == "__main__":
    main()
