"""A torch without a private name that shardkit can do without."""

from __future__ import annotations

import sys
import typing

import torch.distributed.distributed_c10d as c10d
from torch.distributed.fsdp.wrap import CustomPolicy

from shardkit._compat import torch_groups, torch_modules

if typing.TYPE_CHECKING:
    import pytest


def test_a_first_attempt_asks_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.delattr(rendezvous, "_create_c10d_store")
    for attempt in (None, "0"):
        if attempt is None:
            monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        torch_groups.separate_attempts()
    assert not hasattr(rendezvous, "_create_c10d_store")


def test_without_its_function_torch_names_groups_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of its own cache: the function may have been wrapped before.
    monkeypatch.setattr(
        torch_groups, "_wrap_making", vars(torch_groups)["_wrap_making"].__wrapped__
    )
    monkeypatch.delattr(c10d, "_hash_ranks_to_str")
    with torch_groups.named_group("ours"):
        assert not hasattr(c10d, "_hash_ranks_to_str")


def test_a_policy_without_its_function_is_none_of_fsdp1s() -> None:
    policy = CustomPolicy(lambda _: True)
    assert torch_modules.lambda_of_custom_policy(policy) is vars(policy)["_lambda_fn"]
    del vars(policy)["_lambda_fn"]
    assert torch_modules.lambda_of_custom_policy(policy) is None
