"""Train a two-layer KDA language model on associative recall, with this package's operators or with fla's.

    python train_recall.py                                  # ours, on the GPU if there is one
    python train_recall.py --arm fla                        # the same run on fla, for the comparison (needs a GPU)
    python train_recall.py --device cpu --steps 30 --width 32
    torchrun --nproc-per-node 2 train_recall.py --parallel fsdp2    # or ddp: the processes share the batch

The task: a sequence of key-value pairs, then the keys again in another order; after each the model must say its value.
A model that ignores the context stays at log(values). Data and initial weights depend on the seed alone, so two arms
see the same run, as do one process and several, and their curves differ by rounding only.
"""
import argparse
import gc
import importlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

KEYS, VALUES = 64, 16  # tokens 0..63 are keys, 64..79 values
ARMS = {
    "ours": ("kernel_fun.kda", "kernel_fun.cconv"),
    "fla": ("fla.ops.kda", "fla.modules.convolution"),
}


class KDALayer(nn.Module):
    """Short convolution, then KDA with the gate, the norms and beta's sigmoid in the operator, then an output gate."""

    def __init__(self, width: int, heads: int, arm: str):
        super().__init__()
        self.heads, self.K = heads, width // heads
        self.kda = importlib.import_module(ARMS[arm][0]).chunk_kda
        self.conv = importlib.import_module(ARMS[arm][1]).causal_conv1d
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(3 * width, 4) * 0.3)
        self.decay = nn.Linear(width, width, bias=False)
        self.beta = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((width,), -4.0))
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, width = x.shape
        y = self.norm(x)
        qkv, _ = self.conv(self.qkv(y), self.conv_weight, activation="silu")
        q, k, v = (t.view(B, T, self.heads, self.K) for t in qkv.chunk(3, -1))
        o, _ = self.kda(
            q, k, v, self.decay(y).view(B, T, self.heads, self.K), self.beta(y),
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias,
        )
        return x + self.out(o.reshape(B, T, width) * torch.sigmoid(self.gate(y)))


class RecallModel(nn.Module):
    """Embedding, two KDA layers each with an MLP, a tied read-out over the values."""

    def __init__(self, width: int, heads: int, arm: str):
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES, width)
        self.layers = nn.ModuleList(KDALayer(width, heads, arm) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, VALUES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, mlp in zip(self.layers, self.mlps, strict=True):
            x = layer(x)
            x = x + mlp(x)
        return self.head(x)


def batch(size: int, pairs: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [size, 4*pairs], targets of the same shape, -100 where nothing is asked)."""
    order = torch.rand(size, KEYS, generator=random).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (size, pairs), generator=random)
    shuffle = torch.rand(size, pairs, generator=random).argsort(1)
    asked, answers = order.gather(1, shuffle), values.gather(1, shuffle)
    told = torch.stack([order, KEYS + values], -1).flatten(1)
    questions = torch.stack([asked, KEYS + answers], -1).flatten(1)
    targets = torch.stack([answers, torch.full_like(answers, -100)], -1).flatten(1)
    return torch.cat([told, questions], 1), torch.cat([torch.full_like(told, -100), targets], 1)


def split(model: nn.Module, parallel: str) -> nn.Module:
    """The model over all processes: DDP copies it, FSDP2 cuts each layer's parameters among them."""
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))
    for module in (*model.layers, *model.mlps):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(arm="ours", device="cpu", steps=300, width=256, heads=4, size=32, pairs=32, rate=1e-3, seed=0, every=0,
          parallel=None):
    """Train and return the loss of every step. `every` > 0 prints it that often.

    parallel: None, or "ddp" or "fsdp2" in an initialised process group, whose processes share the batch of `size`.
    """
    torch.manual_seed(seed)
    model = RecallModel(width, heads, arm).to(device)
    rank, processes = 0, 1
    if parallel:
        model, rank, processes = split(model, parallel), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    random, losses = torch.Generator().manual_seed(seed), []
    precision = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    for step in range(steps):
        tokens, targets = (t.chunk(processes)[rank].to(device) for t in batch(size, pairs, random))
        with torch.autocast(torch.device(device).type, dtype=precision, enabled=precision is not torch.float32):
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = loss.detach()
        if parallel:
            dist.all_reduce(shown)
        losses.append(shown.item() / processes)
        if every and rank == 0 and (step % every == 0 or step == steps - 1):
            print(f"step {step:5}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, default="ours")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), help="in processes that torchrun started")
    options = vars(parser.parse_args())
    if options["parallel"] is None:
        train(**options, every=20)
        return
    if options["device"].startswith("cuda"):
        options["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(options["device"])
    dist.init_process_group("nccl" if options["device"].startswith("cuda") else "gloo")
    train(**options, every=20)
    gc.collect()  # DDP's model is a reference cycle; left to the interpreter's end, its process group may abort there
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
