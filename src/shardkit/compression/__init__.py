"""Gradients that travel compressed over the replicate axis of a 2-D mesh."""

from shardkit.compression._casts import bf16_compress, compress_gradients, fp16_compress
from shardkit.compression._power_sgd import PowerSGD

__all__ = ["PowerSGD", "bf16_compress", "compress_gradients", "fp16_compress"]
