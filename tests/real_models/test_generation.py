"""`generate` of sharded models, against that of the plain ones."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo import TIMEOUT_S, ZOO

from reference import my_batch, shard
from shardkit import ShardedTensor, register_fsdp_forward_method

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.models


GENERATING = ["llama", "tied_llama", "gpt2", "t5", "mixtral", "whisper"]
NUM_TOKENS = 12
MIN_DIFFERENT = 8


def make_both(name: str) -> tuple[nn.Module, nn.Module]:
    """Make a plain model and the same one sharded.

    With the small weights that they begin with, models repeat one token; these do not.
    """
    plain = ZOO[name].make().eval()
    with torch.no_grad():
        for param in plain.parameters():
            if param.ndim > 1 and param.requires_grad:
                param.mul_(20)
    return plain, shard(ZOO[name], copy.deepcopy(plain))


def compare_generated(name: str, *, is_registered: bool, **options: typing.Any) -> list[bool]:
    """Return whether the tokens are equal: of new models, of used ones, and after a step."""
    case = ZOO[name]
    plain, model = make_both(name)
    if is_registered:
        register_fsdp_forward_method(model, "generate")
    equal, seen = [], set()
    for step in range(3):
        prompt, _ = my_batch(case, step)
        actual, expected = (
            each.generate(prompt, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, **options)
            for each in (model, plain)
        )
        seen.update(expected[:, -NUM_TOKENS:].flatten().tolist())
        equal.append(torch.equal(actual, expected))
        assert all(isinstance(param, ShardedTensor) for param in model.parameters())
        if step == 1:
            shared = case.batch(torch.Generator().manual_seed(0))
            for each in (model, plain):
                case.loss(each, shared).backward()
                torch.optim.SGD(each.parameters(), lr=1e-3).step()
    assert len(seen) > MIN_DIFFERENT, "models that repeat themselves show little"
    return equal


def generate_greedily(name: str, use_cache: bool, is_registered: bool) -> list[bool]:
    return compare_generated(
        name, is_registered=is_registered, use_cache=use_cache, do_sample=False
    )


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", GENERATING)
def test_generate_gives_the_tokens_of_the_plain_model(
    spawn: Spawn, name: str, *, use_cache: bool
) -> None:
    found = spawn(generate_greedily, 2, name, use_cache, True, timeout_s=TIMEOUT_S)
    assert found == [[True] * 3] * 2


@pytest.mark.parametrize("name", GENERATING)
def test_it_works_as_it_is_where_nothing_is_registered(spawn: Spawn, name: str) -> None:
    """What generate calls beside forward, an encoder, gathers the weights that it reads."""
    found = spawn(generate_greedily, 2, name, True, False, timeout_s=TIMEOUT_S)
    assert found == [[True] * 3] * 2


def generate_in_beams(name: str) -> list[bool]:
    return compare_generated(name, is_registered=True, num_beams=3, do_sample=False)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beam_search_gives_the_tokens_of_the_plain_model(spawn: Spawn, name: str) -> None:
    assert spawn(generate_in_beams, 2, name, timeout_s=TIMEOUT_S) == [[True] * 3] * 2


def generate_other_lengths(name: str) -> tuple[int, bool]:
    """Return how many tokens this rank has generated, and whether the plain model does so too."""
    plain, model = make_both(name)
    register_fsdp_forward_method(model, "generate")
    prompt, _ = my_batch(ZOO[name], 0)
    count = 3 + 4 * dist.get_rank()
    options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
    actual = model.generate(prompt, synced_gpus=True, **options)
    return count, torch.equal(actual, plain.generate(prompt, **options))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_ranks_may_generate_other_lengths_where_they_wait_for_each_other(
    spawn: Spawn, name: str
) -> None:
    """``synced_gpus``: a rank that is done goes on running forward for the others."""
    found = spawn(generate_other_lengths, 2, name, timeout_s=TIMEOUT_S)
    assert found == [(3, True), (7, True)]


def generate_from_embeddings() -> bool:
    plain, model = make_both("tied_llama")
    register_fsdp_forward_method(model, "generate")
    prompt, _ = my_batch(ZOO["tied_llama"], 0)
    model.unshard()
    embedded = model.get_input_embeddings()(prompt).detach()
    model.reshard()
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    expected = plain.generate(inputs_embeds=plain.get_input_embeddings()(prompt), **options)
    return torch.equal(model.generate(inputs_embeds=embedded, **options), expected)


def test_embeddings_can_be_used_between_unshard_and_reshard(spawn: Spawn) -> None:
    assert spawn(generate_from_embeddings, 2, timeout_s=TIMEOUT_S) == [True] * 2
