"""Numbers coded in blocks: what codes stand for is coded to numbers that are bit-equal."""

from __future__ import annotations

import pytest
import torch

from shardkit.optim._codecs import decode, encode

# As torchao's and bitsandbytes': the least number of signed tables is larger than -1.
TABLES = {
    "8 bits": torch.cat([torch.linspace(-0.992968738, 0.992968738, 255), torch.ones(1)]),
    "4 bits": torch.cat([torch.linspace(-0.887500048, 0.887500048, 15), torch.ones(1)]),
    "squares": torch.linspace(1 / 16, 1, 16),
}
BLOCK, BLOCKS = 64, 2_000


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_decoded_numbers_are_coded_to_the_same(table: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, len(table) - 1, (BLOCKS, BLOCK), generator=generator)
    codes[:, 0] = len(table) - 1
    if table[0] < 0:
        codes[::2, 0] = 0  # Either end gives a block its scale.
    scales = torch.logspace(-15, 3, BLOCKS).clip(1e-12)
    values = decode(codes, table, scales, BLOCK)
    found, found_scales = encode(values, table, BLOCK)
    assert torch.equal(decode(found, table, found_scales, BLOCK), values.view(-1))
    assert torch.equal(found, codes.view(-1).to(torch.uint8))
