"""Launches on a stream of its own without waiting for the caller's: reads whatever is there before the inputs have
arrived."""

import torch

FAMILY, EXPECTED, CASE, GPU = "kda", "WRONG_STREAM", "tiny_gate", True


def op(inputs, chain_op):
    with torch.cuda.stream(torch.cuda.Stream()):
        result = chain_op(inputs)
        torch.cuda.current_stream().synchronize()
    return result
