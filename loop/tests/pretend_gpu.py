"""A pretend GPU: the calls that loop.bench makes to torch.cuda, answered on a CPU, so that its GPU path runs in a test.

A graph is captured by running its body once under `capturing`, and replayed by running the recorded functions again.
Events read the host's clock. Nothing here says anything about a GPU's time.
"""

import contextlib
import time
import types


class Event:
    def __init__(self, enable_timing=False):
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Stream:
    pass


class PretendGpu:
    """State of the pretend device: `capturing` while a graph records, `refuse` to make captures fail, counters."""

    def __init__(self):
        self.capturing, self.refuse, self.current = False, "", Stream()
        self.captures, self.replays, self.sleeps = 0, 0, []
        self.bodies, self.generator_resets = [], 0
        gpu = self

        class CUDAGraph:
            def replay(self):
                gpu.replays += 1
                self.body()

        self.CUDAGraph = CUDAGraph

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None):
        before, self.current, self.capturing = self.current, stream, True
        yield
        self.capturing = False
        if self.refuse:
            raise RuntimeError(self.refuse)  # as torch does: its own stream stays in place
        self.current = before
        self.captures += 1
        graph.body = self.bodies.pop(0)

    def reset_generator(self):
        self.generator_resets += 1

    def names(self) -> dict:
        """torch.cuda's names that loop.bench, loop.calls and loop.lanes use."""
        properties = types.SimpleNamespace(L2_cache_size=20_000)
        return {
            "CUDAGraph": self.CUDAGraph, "Event": Event, "Stream": Stream, "stream": self.stream, "graph": self.graph,
            "graph_pool_handle": object, "current_stream": lambda: self.current, "current_device": lambda: 0,
            "set_stream": lambda s: setattr(self, "current", s), "synchronize": lambda: None,
            "empty_cache": lambda: None, "_sleep": self.sleeps.append, "get_device_properties": lambda: properties,
            "memory_allocated": lambda: 1000, "max_memory_allocated": lambda: 5000,
            "reset_peak_memory_stats": lambda: None,
        }  # fmt: skip
