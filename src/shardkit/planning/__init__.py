"""Foreseeing a run: what it holds and what it sends, before anything is launched."""

from shardkit.planning._api import plan
from shardkit.planning._plan import Advice, Instant, OwnedMemory, RunPlan, SentTotal

__all__ = ["Advice", "Instant", "OwnedMemory", "RunPlan", "SentTotal", "plan"]
