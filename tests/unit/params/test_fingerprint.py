"""Numbers that tell whether ranks hold equal values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardkit._params.bucket import fingerprint

MIB = 2**20


def every_octet(tensor: Tensor) -> Tensor:
    """The definition, at once."""
    octets = tensor.reshape(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, octets.numel() + 1)
    return ((octets + 1) * (places * (0x9E3779B97F4A7C15 - (1 << 64)))).sum()


@pytest.mark.parametrize("numel", [1, 7, MIB // 4, MIB // 4 + 1, 3 * MIB // 4 + 5])
def test_it_is_the_same_in_parts(numel: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    assert fingerprint(tensor, max_samples=0).equal(every_octet(tensor))


@pytest.mark.parametrize("place", [0, MIB // 4, MIB - 1])
def test_one_bit_changes_it(place: int) -> None:
    tensor = torch.zeros(MIB)
    other = tensor.clone()
    other[place] = -0.0
    assert not fingerprint(tensor, max_samples=0).equal(fingerprint(other, max_samples=0))


def test_nothing_has_one_too() -> None:
    assert fingerprint(torch.zeros(0, 3)).item() == 0


def test_it_is_that_of_the_values_of_a_conjugate() -> None:
    tensor = torch.randn(7, dtype=torch.complex64)
    assert fingerprint(tensor.conj()).equal(every_octet(tensor.conj_physical()))
