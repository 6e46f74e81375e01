"""Tests of the harness: on a CPU, with tiny cases; those that need a GPU skip with the reason."""
