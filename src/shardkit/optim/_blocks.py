"""Numbers coded in blocks: for each a place in a table, for each block a scale.

The packages that keep state so have functions of their own. Of a block whose largest number is
negative theirs take that as the scale, though the tables end before -1: coded twice, the block
shrinks, by a ninth with 4 bits. Here the scale is the least that has all numbers within the table,
so that decoded numbers are coded to the same codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALLEST_SCALE = 1e-12


def encode(values: Tensor, table: Tensor, block_numel: int) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, as many as there are values; and scales, fp32, one for each block.

    Args:
        values: A tensor of any shape; the last block may be short.
        table: Ascending, at most 256 numbers from -1 to 1.
        block_numel: Elements of a block.
    """
    flat = values.float().reshape(-1)
    padding = -flat.numel() % block_numel
    blocks = F.pad(flat, (0, padding)).view(-1, block_numel)
    below = blocks.amin(1) / table[0].clamp(max=-_SMALLEST_SCALE)  # Tables of squares have no such.
    scales = torch.maximum(blocks.amax(1) / table[-1], below).clip(_SMALLEST_SCALE)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales[:, None], between).to(torch.uint8)
    return codes.view(-1)[: flat.numel()], scales


def decode(codes: Tensor, table: Tensor, scales: Tensor, block_numel: int) -> Tensor:
    """Return the numbers of codes, fp32, in the shape of the codes."""
    flat = table[codes.reshape(-1).long()]
    of_each = scales.repeat_interleave(block_numel)[: flat.numel()]
    return (flat * of_each).view(codes.shape)


def pack_pairs(codes: Tensor) -> Tensor:
    """Return two codes of 4 bits in each byte, the first one in the upper half."""
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1]
