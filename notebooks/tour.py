# %% [markdown]
# # A tour: what KDA computes, what a stage is, how an idea is added
#
# Kimi Delta Attention keeps one matrix per head, the state $S$ (K rows, V columns). A token does four things to it:
# decay every row by its own gate, read what is stored under the key, write back the difference to its value with
# strength beta, and answer the query:
#
# $$S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{diag}(e^{g_t})\,S_{t-1} + \beta_t k_t v_t^\top$$
# $$o_t = K^{-1/2}\,S_t^\top q_t$$

# %% tags=["parameters"]
T: int = 128  # tokens

# %%
import torch

torch.manual_seed(0)
K = V = 64
q, k, v = (torch.nn.functional.normalize(torch.rand(T, K, dtype=torch.float64), dim=-1) for _ in range(3))
g = torch.nn.functional.logsigmoid(torch.randn(T, K, dtype=torch.float64))  # natural log of the decay, at most 0
beta = 2 * torch.randn(T, dtype=torch.float64).sigmoid()


def recurrence(q, k, v, g, beta):
    """The definition, one token at a time."""
    S, out = q.new_zeros(K, V), []
    for t in range(len(q)):
        S = g[t].exp()[:, None] * S
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        out.append(S.T @ q[t] * K**-0.5)
    return torch.stack(out)


o = recurrence(q, k, v, g, beta)
o.shape

# %% [markdown]
# ## Chunks and stages
# One token at a time leaves the tensor cores idle. The chain works on chunks of 64 tokens instead and passes tensors
# from stage to stage: gates are summed up inside the chunk (`gk`), the 64 corrections of a chunk are solved for at
# once (`Akk`), and only the state goes from chunk to chunk (`h`). The stages, in order, and the function that defines
# each in plain torch:

# %%
from kernel_fun.kda import chain, reference
from loop import tables

tables.Table(
    "KDA's stages",
    ["stage", "reads", "writes", "defined by"],
    [[s.name, ", ".join(s.reads), ", ".join(s.writes), reference.STAGES[s.name].__name__] for s in chain.STAGES],
)

# %% [markdown]
# The chain gives what the recurrence gives. Here it runs on the reference stages in float64, so the difference is
# rounding:

# %%
from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import autograd

p = KdaProblem(B=1, T=T, H=1, HV=1, K=K, V=V, N=1, NT=-(-T // 64), dtype=torch.float64, scale=K**-0.5)
plan = chain.make_plan(p, base="reference", shipped=False)
inputs = [x[None, :, None] for x in (q, k, v, g)] + [beta[None, :, None]]
chunked, _ = autograd.apply(plan, p, *inputs)
difference = (chunked[0, :, 0] - o).abs().max().item()
assert difference < 1e-10, difference
difference

# %% [markdown]
# ## An idea replaces a span
# An idea names the consecutive stages it replaces and gives one function for them. `./ladder new` writes a folder
# that works at once, with the span's reference stages as the starting kernel:
#
# ```
# ./ladder new 031 fuse-gate --family kda --span fwd.gate
# ./ladder check kda --impl 031 --case tiny_gate
# ./ladder open 031
# ```
#
# Then the idea's `kernel.py` is edited and its notebook's check and bench cells are run again. `IDEA.md` states,
# before the first timed run, what should get faster and by how much. The floor below is what a span costs if its
# tensors cross memory once, at the case that a training run uses:

# %%
from loop import cases, contract

production = cases.get("kda", "prod8192_gate").problem((9, 0))
spans = ("fwd.gate", "fwd.intra..fwd.wy", "bwd.intra..bwd.cumsum", "fwd.norm..fwd.out")
floors = {span: contract.span_floor("kda", span, production) for span in spans}
tables.Table(
    "floors at prod8192_gate on an H200",
    ["span", "GB", "Tflop", "ms", "bound"],
    [[s, f"{f.bytes / 1e9:.2f}", f"{f.flops / 1e12:.3f}", f"{f.ms:.2f}", f.bound] for s, f in floors.items()],
)
