"""What steps cost on this engine: graphs timed at start-up, and arithmetic for the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from vllm_recycle.core.roofline import (
    NO_WEIGHTS,
    OF_BANDWIDTH,
    OF_FLOPS,
    Device,
    ModelCosts,
    Weights,
    device_of,
)
from vllm_recycle.core.step_seconds import GraphShape, StepSeconds
from vllm_recycle.integration.cuda.graphs import shape_of
from vllm_recycle.integration.cuda.ouroboros.speculator import OuroborosSpeculator
from vllm_recycle.integration.drafter import from_first_rank

ROUNDS = 5
# Of a device that is not known: the side of a matrix product, and MiB that are copied.
SIDE, COPIED_MIB = 4096, 128
# Read and written for a logit: the matrix product, the sampler, and the search of the top k.
BYTES_OF_LOGIT = 12


def find_step_seconds(runner: Any) -> tuple[StepSeconds, str]:
    """The times of steps, and a line that says what was found.

    Args:
        runner: a `TreeModelRunner` with its graphs, and without requests.

    """
    device = device_of(current_platform.get_device_name())
    origin = "known" if device is not None else "measured"
    if device is None:
        device = measure_device(runner.device)
    found = from_first_rank(
        StepSeconds(
            device,
            costs_of(runner.vllm_config, runner.model),
            time_graphs(runner),
            time_drafting(runner),
        )
    )
    drafting = ", ".join(f"{1e3 * seconds:.2f} for {n}" for n, seconds in found.drafting.items())
    return found, (
        f"sizes of trees are chosen step by step; {len(found.measured)} graphs timed, drafting "
        f"takes {drafting} requests, in ms; a device, {origin}, of "
        f"{device.flops / 1e12:.0f} TFLOPS and {device.bandwidth / 1e12:.2f} TB/s"
    )


def costs_of(vllm_config: Any, model: torch.nn.Module) -> ModelCosts:
    """What this rank's part of a model has to read and compute."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    quantization = vllm_config.quant_config
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    apart = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding | RoutedExperts)
        for parameter in module.parameters()
    }
    rest = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    layers, head_size = config.get_num_layers(parallel), config.get_head_size()
    item = config.dtype.itemsize
    head = config.get_vocab_size() * config.get_hidden_size() / parallel.tensor_parallel_size
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    windows = [layer.sliding_window for layer in attention if layer.sliding_window is not None]
    moe = experts[0].moe_config if experts else None
    expert = NO_WEIGHTS
    if moe is not None:
        held = [parameter for module in experts for parameter in module.parameters()]
        all_of_them = weights_of(held, quantization)
        expert = Weights(
            all_of_them.count / moe.num_experts, all_of_them.num_bytes / moe.num_experts
        )
    return ModelCosts(
        layers=layers,
        dense=weights_of(rest, quantization),
        head=Weights(head, head * item),
        kv_bytes=layers * 2 * config.get_num_kv_heads(parallel) * head_size * item,
        attention_flops=layers * 4 * config.get_num_attention_heads(parallel) * head_size,
        logits_bytes=config.get_vocab_size() * BYTES_OF_LOGIT,
        expert=expert,
        num_experts=moe.num_experts if moe is not None else 0,
        experts_per_row=moe.experts_per_token if moe is not None else 0,
        windows=tuple(Counter(windows).items()),
    )


def weights_of(parameters: list[torch.nn.Parameter], quantization: Any) -> Weights:
    """How many numbers some parameters hold, packed or not, and their bytes.

    One that is computed with in 8 bits counts half: tensor cores do it at twice the rate.
    """
    count = 0.0
    for parameter in parameters:
        bits = 8 * parameter.dtype.itemsize
        if parameter.dtype.is_floating_point:
            count += parameter.numel() * (0.5 if bits == 8 else 1.0)
        elif parameter.dtype == torch.int8:
            count += parameter.numel() * 0.5
        else:
            count += parameter.numel() * bits / getattr(quantization, "weight_bits", 4)
    return Weights(count, sum(parameter.nbytes for parameter in parameters))


def time_graphs(runner: Any) -> dict[GraphShape, float]:
    """Seconds of the layers of each graph, behind no context."""
    manager, times = runner.cudagraph_manager, {}
    for desc in manager.graphs if manager is not None else ():
        if desc.num_active_loras:
            continue  # what adapters add to a step is left out
        shape = shape_of(desc)
        prepare_inputs_to_capture(
            shape.num_reqs,
            shape.num_tokens,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=True,
            max_query_len=shape.max_query_len,
        )
        # Rows that fill up a batch meet no experts, and tokens that are all the same the same ones.
        runner.input_buffers.is_padding.fill_(False)
        runner.input_buffers.input_ids[: shape.num_tokens].random_(
            runner.model_config.get_vocab_size()
        )
        times[shape] = _median_seconds(partial(manager.run_fullgraph, desc), runner.device)
    return times


def time_drafting(runner: Any) -> dict[int, float]:
    """Seconds to draft, by how many requests that is for at most."""
    if isinstance(runner.speculator, OuroborosSpeculator):
        rounds = runner.speculator.empty_rounds()
        return {batch: _median_seconds(run, runner.device) for batch, run in rounds.items()}
    idx_mapping = torch.zeros(1, dtype=torch.int64, device=runner.device)
    last_sampled = runner.req_states.last_sampled_tokens
    grow = partial(runner.drafter.propose, idx_mapping, last_sampled)
    # More of them grow at the same time.
    return {runner.max_num_reqs: _median_seconds(grow, runner.device)}


def measure_device(device: torch.device) -> Device:
    """The peaks of a device of which only what it reaches is seen."""
    matrix = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    source = torch.empty(COPIED_MIB << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _median_seconds(lambda: matrix @ matrix, device)
    copy = _median_seconds(lambda: target.copy_(source), device)
    return Device(
        flops=2 * SIDE**3 / product / OF_FLOPS, bandwidth=2 * source.nbytes / copy / OF_BANDWIDTH
    )


def _median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    run()  # what is slow at the first time only
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
