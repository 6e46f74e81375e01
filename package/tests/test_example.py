"""examples/train_recall.py: runs on a CPU, repeats, trains every parameter; on a GPU ours and fla give one curve."""
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples come with the source tree, not with the wheel", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))

import train_recall  # noqa: E402

TINY = {"width": 32, "heads": 2, "size": 4, "pairs": 8}


def test_a_few_steps_on_a_cpu_repeat():
    first, again = (train_recall.train(steps=3, **TINY) for _ in range(2))
    assert first == again
    assert all(0 < loss < 10 for loss in first)
    assert train_recall.train(steps=3, seed=1, **TINY) != first


def test_every_parameter_gets_a_gradient():
    torch.manual_seed(0)
    model = train_recall.RecallModel(32, 2, "ours")
    tokens, targets = train_recall.batch(4, 8, torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_the_batch_asks_what_it_told():
    tokens, targets = train_recall.batch(4, 8, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 32)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        told = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(told) == 8
        assert [train_recall.KEYS + v for v in wanted[16::2]] == [told[key] for key in row[16::2]]
        assert wanted[:16] == [-100] * 16
        assert wanted[17::2] == [-100] * 8


@pytest.mark.gpu
@pytest.mark.slow
def test_ours_and_flas_curves_agree():
    """Means over the last tenth of training: closer to each other than two seeds of fla are, or within 2 %."""
    settings = {"device": "cuda", "steps": 400, "width": 256, "heads": 2, "pairs": 32}
    ours, fla = (train_recall.train(arm=arm, **settings) for arm in ("ours", "fla"))
    other_seed = train_recall.train(arm="fla", seed=1, **settings)
    tail = [sum(losses[-40:]) / 40 for losses in (ours, fla, other_seed)]
    assert abs(tail[0] - tail[1]) <= max(abs(tail[2] - tail[1]), 0.02 * tail[1])
    assert abs(ours[0] - fla[0]) < 0.01 * fla[0]
