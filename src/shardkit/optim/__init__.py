"""Optimizers that run another one, on the pieces of this rank or on the matrices that it owns."""

from shardkit.optim._delegating import DelegatingOptimizer
from shardkit.optim._local import LocalOptimizer
from shardkit.optim._matrix import MatrixOptimizer

__all__ = ["DelegatingOptimizer", "LocalOptimizer", "MatrixOptimizer"]
