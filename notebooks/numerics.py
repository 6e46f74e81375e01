# %% [markdown]
# # Error against gate strength
# The same inputs with gates made weaker and stronger, and what an arm's outputs then differ by from the fp64 oracle.
# A kernel that factors an exponential through a reference row that does not lie between its two rows overflows on the
# right side of this plot; one that keeps its state in bf16 drifts on the left,
# where the state outlives the sequence and with beta near 2 even fla misses its budget.

# %% tags=["parameters"]
family: str = "kda"
arm: str = "000"  # any arm: 000, ship, an idea's number
base: str = "tiny_gate"  # the case whose gates are scaled
strengths: str = "0.001 0.1 1 4 16 64"
seed: int = 0

# %%
import dataclasses

from loop import arms, cases, compare, contract, inputs, oracle

case = cases.get(family, base)
made = arms.make(family, arm)
found = {}
for strength in map(float, strengths.split()):
    scaled = dataclasses.replace(
        case, id=f"{base}_x{strength:g}", dist=dataclasses.replace(case.dist, strength=strength)
    )
    given = inputs.make(scaled, seed, "cuda" if arms.on_gpu() else "cpu")
    got, truth = inputs.run(made.op, given), oracle.oracle(given)
    found[strength] = {n: compare.difference(t, truth[n]).rel_rms for n, t in got.items() if t is not None}

# %%
from loop import plots

problem = case.problem(arms.arch())
budgets = {name: contract.budget(family, name, problem) for name in next(iter(found.values()))}
plots.error_curves(found, budgets, f"{made.name} ({made.what}): error against gate strength, {base}")
