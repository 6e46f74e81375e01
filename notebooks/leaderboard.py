# %% [markdown]
# # The leaderboard
# The newest time of every arm, per family, case and mode. A ratio above 1 is faster than the baseline. Rows of a
# machine without a GPU are left out unless asked for: they say nothing about a GPU.

# %% tags=["parameters"]
family: str = ""  # kda or cconv; empty: both
cpu: bool = False  # show rows of machines without a GPU

# %%
from loop import board, plots, tables

entries = [e for e in board.entries() if (cpu or e["device"] != "cpu") and family in ("", e["family"])]
rows = [
    (e["family"], e["case"], e["mode"], e["arm"], e["baseline"], f"{e['ms']:.3f}", f"{e['ratio']:.3f}",
     f"{e['ci_low']:.3f} to {e['ci_high']:.3f}", tables.number(e["floor_ms"] and 100 * e["floor_ms"] / e["ms"], 2),
     "stale" if e["stale"] else "")
    for e in entries
]  # fmt: skip
header = ("family", "case", "mode", "arm", "against", "ms", "ratio", "interval", "% of floor", "")
tables.Table(
    f"{len(rows)} times", header, rows, bad=["stale"]
) if rows else "no times recorded yet: ./ladder bench writes them"

# %% [markdown]
# Time against the floor, one point per arm and case: the diagonal is the floor itself.

# %%
plots.against_floor([e for e in entries if e["floor_ms"]])
