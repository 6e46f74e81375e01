"""Kimi Delta Attention: a drop-in for fla's `chunk_kda`."""
from .ops import chunk_kda, is_supported
from .warm import warmup

__all__ = ["chunk_kda", "is_supported", "warmup"]
