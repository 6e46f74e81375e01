"""Short causal depthwise convolution: a drop-in for fla's `causal_conv1d`."""
from .ops import causal_conv1d, is_supported, warmup

__all__ = ["causal_conv1d", "is_supported", "warmup"]
