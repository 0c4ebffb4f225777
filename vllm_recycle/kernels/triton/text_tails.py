"""The ends of texts, which contexts are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 32  # requests of one program


def read_tails(
    all_token_ids: torch.Tensor, idx_mapping: torch.Tensor, total_len: torch.Tensor, *, reach: int
) -> torch.Tensor:
    """The ends of texts.

    Args:
        all_token_ids: int32 [max_num_reqs, max_model_len], of the device or mapped for it; no
            more is read than the ends.
        idx_mapping: integer [batch].
        total_len: integer [max_num_reqs], the tokens of each text.

    Returns:
        int64 [batch, reach], the newest token first, -1 before the first one.

    """
    batch = idx_mapping.shape[0]
    tails = torch.empty(batch, reach, dtype=torch.int64, device=idx_mapping.device)
    _read_tails_kernel[(triton.cdiv(batch, LANES),)](
        tails,
        all_token_ids,
        all_token_ids.stride(0),
        idx_mapping.contiguous(),
        total_len.contiguous(),
        batch,
        REACH=reach,
        PLACES=triton.next_power_of_2(reach),
        LANES=LANES,
        num_warps=1,
    )
    return tails


@triton.jit(do_not_specialize=["batch"])
def _read_tails_kernel(
    tails: tl.tensor,
    all_token_ids: tl.tensor,
    stride: int,
    idx_mapping: tl.tensor,
    total_len: tl.tensor,
    batch: int,
    REACH: tl.constexpr,
    PLACES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    real = index < batch
    request = tl.load(idx_mapping + index, mask=real, other=0).to(tl.int64)
    text = all_token_ids + request * stride
    end = tl.load(total_len + request, mask=real, other=0).to(tl.int64) - 1
    place = tl.arange(0, PLACES)[None, :]
    newest = end[:, None] - place
    inside = (place < REACH) & (newest >= 0)
    token = tl.load(text[:, None] + newest, mask=inside, other=-1).to(tl.int64)
    tl.store(
        tails + index[:, None].to(tl.int64) * REACH + place,
        token,
        mask=real[:, None] & (place < REACH),
    )
