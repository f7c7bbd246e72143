"""Optimizers that run another one: on what this rank holds, or on what it owns."""

from shardkit.optim._delegating import DelegatingOptimizer
from shardkit.optim._local import LocalOptimizer
from shardkit.optim._matrix import MatrixOptimizer

__all__ = ["DelegatingOptimizer", "LocalOptimizer", "MatrixOptimizer"]
