"""Promoted kernels, byte-identical to their ideas (see ../_provenance.py). Change and promote the idea, not these."""
