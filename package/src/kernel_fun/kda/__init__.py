"""Kimi Delta Attention: a drop-in for fla's `chunk_kda`."""
