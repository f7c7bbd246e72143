"""Hypothesis strategies for what a layout must cope with."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

FLOATING_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

world_sizes = st.integers(1, 9)
dtypes = st.sampled_from((*FLOATING_DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool))
floating_dtypes = st.sampled_from(FLOATING_DTYPES)

# Few elements: tests may make such tensors.
scalar_shapes = st.just(())
empty_shapes = st.sampled_from(((0,), (0, 4), (3, 0), (2, 0, 5)))
small_shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)
shapes = st.one_of(small_shapes, scalar_shapes, empty_shapes)
shape_lists = st.lists(shapes, min_size=1, max_size=8)

# For arithmetic only: up to 2**48 elements, more than fit into 32 bits and than a float counts
# exactly in bytes.
huge_shapes = st.lists(st.integers(2**8, 2**16), min_size=1, max_size=3).map(tuple)
any_shapes = st.one_of(shapes, huge_shapes)
any_shape_lists = st.lists(any_shapes, min_size=1, max_size=8)

# Element sizes of the dtypes that parameters have.
itemsizes = st.sampled_from((1, 2, 4, 8))
