# %% [markdown]
# # One idea, from check to verdict
#
# Edit the idea's `kernel.py`, save it, and run the *check* and *bench* cells again: they load the source as it is
# now, and a time is only ever taken of a build that has passed its check. Without a GPU the `tiny` cases run, with
# Triton kernels in the interpreter; their times say nothing about a GPU.

# %% tags=["parameters"]
idea = "000"
case: str = ""  # a case of the idea's family; empty: a tiny one without a GPU, the primary one on a GPU
mode: str = "fwdbwd"  # fwd, bwd or fwdbwd
seed: int = 0  # of the inputs that are timed; a check draws fresh ones each time

# %% tags=["loop:load"]
from loop import session

s = session.open_idea(idea, case=case, mode=mode, seed=seed)
s

# %% [markdown]
# ## Contract
# What the span reads and writes at this case, and the least time its bytes and flops allow.

# %% tags=["loop:contract"]
s.contract()

# %% [markdown]
# ## Check
# Error per output against the fp64 oracle, fla's own error, the budget; NaN-poisoned buffers, guard bands, unmodified
# inputs, equal bits in repeated runs.

# %% tags=["loop:check"]
s.check()

# %% [markdown]
# ## Bench
# Against `000` (fla alone; without a GPU the reference chain) and `ship` (what the package ships), in one process.

# %% tags=["loop:bench"]
s.bench()

# %% tags=["loop:record"]
s.record()

# %% [markdown]
# ## Plots

# %% tags=["loop:plots"]
s.plots()

# %% [markdown]
# ## Verdict

# %% tags=["loop:verdict"]
s.verdict()
