"""What the operators' warm-ups do alike."""
import torch


def run_backwards(y: torch.Tensor, ht: torch.Tensor | None, leaves: list[torch.Tensor]) -> None:
    """The backward with a gradient of the final state, where there is one, and without: each is compiled apart."""
    for outputs in ((y,),) if ht is None else ((y, ht), (y,)):
        incoming = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, incoming, retain_graph=True, allow_unused=True)
