# %% [markdown]
# # Where the time can go
# What each stage must cost by itself at a case, if its tensors cross memory once and its products run at the tensor
# rate, against one kernel for each pass. The gap between the sum of the stages and the whole pass is what fusing can
# win.

# %% tags=["parameters"]
family: str = "kda"
case: str = "prod8192_gate"

# %%
from loop import cases, contract, plots, tables

problem = cases.get(family, case).problem((9, 0))
stages = contract.cost_table(family, problem)
tables.Table(
    f"{family}, {case}: floors on an H200",
    ("stage", "GB", "Gflop", "ms", "bound"),
    [
        (s["stage"], f"{s['bytes'] / 1e9:.3f}", f"{s['flops'] / 1e9:.0f}", f"{s['floor_ms']:.3f}", s["bound"])
        for s in stages
    ],
)

# %%
passes = {}
for mode in ("fwd", "bwd"):
    whole = contract.floor(family, mode, problem)
    passes[mode] = (sum(s["floor_ms"] for s in stages if s["stage"].startswith(mode)), whole.ms)
tables.Table(
    "stages one by one against one kernel a pass",
    ("pass", "sum of stage floors, ms", "floor of the pass, ms", "ratio"),
    [(mode, f"{a:.2f}", f"{b:.2f}", f"{a / b:.1f}") for mode, (a, b) in passes.items()],
)

# %%
plots.stages(family, problem, (), f"{case}: floor of every stage by itself")

# %% [markdown]
# What the stages take, where that has been recorded (`./ladder stages` on a GPU): fla's chain and the shipped one as
# stacked bars over the floors. A family without a recording shows its floors alone.

# %%
from loop import budget

tables.Stack(*(plots.stacked(plot) for plot in budget.plots()))
