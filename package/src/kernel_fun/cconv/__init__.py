"""Short causal depthwise convolution: drop-ins for fla's `causal_conv1d` and its one-token `causal_conv1d_update`."""
from .decode import causal_conv1d_update
from .ops import causal_conv1d, is_supported, warmup

__all__ = ["causal_conv1d", "causal_conv1d_update", "is_supported", "warmup"]
