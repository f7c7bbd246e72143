"""Predicting a run: the memory and the traffic of a rank, before anything is launched."""

from shardkit.planning._api import plan
from shardkit.planning._plan import Advice, Choice, Instant, OwnedMemory, RunPlan, SentTotal
from shardkit.planning._time import ModuleCost, Span, StepTime

__all__ = [
    "Advice",
    "Choice",
    "Instant",
    "ModuleCost",
    "OwnedMemory",
    "RunPlan",
    "SentTotal",
    "Span",
    "StepTime",
    "plan",
]
