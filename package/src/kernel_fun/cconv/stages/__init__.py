"""Promoted kernels, each byte-identical to the idea it came from (see ../_provenance.py). Do not edit: change the idea
and promote it.
"""
