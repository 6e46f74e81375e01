"""Ideas 023 and 024 as they run in production: whole tiles, their own constants, what must not leak between rows."""

from types import SimpleNamespace

import pytest
import torch

from kernel_fun.cconv import reference
from loop import poison, registry
from loop.tests.test_conv_backward_idea import backward
from loop.tests.test_conv_forward_idea import forward, never, turn
from loop.tests.test_conv_idea import assert_matches, in_fp64, make


@pytest.fixture(scope="module")
def ideas():
    """Both with their own constants and without what they fall back on."""
    f, b = registry.fresh("023"), registry.fresh("024")
    f.strip_fwd = b.strip_bwd = b._strips = never
    return f, b


def check_both(ideas, c):
    f, b = ideas
    wide = in_fp64(c)
    assert_matches(forward(f.SPANS, c), forward(reference.STAGES, wide), c.x.dtype)
    assert_matches(backward(b.SPANS, c), backward(reference.STAGES, wide), c.x.dtype)


@pytest.mark.parametrize("cu", [None, [0, 31, 32, 33, 64, 127, 128, 131, 131, 256], [0, 256]], ids=str)
@pytest.mark.parametrize("T", [256, 259])
def test_production_tiles_whole_and_ragged(ideas, cu, T):
    """FULL and EVEN together, packed ones too, and the first rows of the next CTA."""
    cu = cu and [*cu[:-1], T]
    check_both(ideas, make(1, T, 64, 4, h0=False, ht=False, cu=cu, dtype=torch.float32))


@pytest.mark.parametrize(("T", "D"), [(128, 64), (129, 72)])
def test_production_turned_tiles(ideas, T, D):
    check_both(ideas, turn(make(1, T, D, 4, h0=False, ht=False, dtype=torch.float32)))


@pytest.mark.parametrize("lies", ["plain", "packed", "turned"])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_nan_stays_in_its_sequence(ideas, lies, name):
    """A NaN in one sequence, at either end of it, reaches no other; dense: no other batch row."""
    cu = [0, 33, 34, 34, 64, 70] if lies == "packed" else None
    c = make(1 if cu else 2, 70, 24, 4, h0=False, ht=False, cu=cu, dtype=torch.float32)
    for t in (34, 63) if cu else (0, 69):
        getattr(c, name)[-1, t, 5] = float("nan")
    c = turn(c) if lies == "turned" else c
    got = {"y": forward(ideas[0].SPANS, c)["y"], "dx": backward(ideas[1].SPANS, c)["dx"]}
    want = {"y": forward(reference.STAGES, c)["y"], "dx": backward(reference.STAGES, c)["dx"]}
    for n, t in want.items():
        assert torch.equal(got[n].isnan(), t.isnan()), n


@pytest.mark.parametrize("lies", ["plain", "packed", "turned"])
def test_nothing_beyond_the_views_is_read_and_all_is_written(ideas, lies):
    """x and dy misaligned in buffers of NaN; what the ideas allocate is NaN, between bands (loop.poison)."""
    cu = [0, 1, 33, 33, 70] if lies == "packed" else None
    c = make(1 if cu else 2, 70, 40, 3, h0=False, cu=cu, dtype=torch.float32)

    def hide(t):
        raw = torch.full((t.numel() + 2001,), float("nan"), device=t.device)
        raw[1001 : 1001 + t.numel()] = t.mT.reshape(-1) if lies == "turned" else t.reshape(-1)
        inner = raw[1001 : 1001 + t.numel()]
        return inner.view(t.shape[0], t.shape[2], t.shape[1]).mT if lies == "turned" else inner.view(t.shape)

    c = SimpleNamespace(**(vars(c) | {"x": hide(c.x), "dy": hide(c.dy), "dht": None}))
    with poison.Poison() as p:
        check_both(ideas, c)
    assert p.count
    assert not p.trespassed()


@pytest.mark.parametrize("n", [512, 513])
def test_the_most_sequences(n):
    """512 are the idea's own, 513 the strips'."""
    f, b = registry.fresh("023"), registry.fresh("024")
    cu = [0, *sorted(torch.randint(0, 66, (n - 1,), generator=torch.Generator().manual_seed(0)).tolist()), 66]
    c = make(1, 66, 16, 4, h0=False, ht=False, cu=cu, dtype=torch.float32)
    check_both((f, b), c)
    f.strip_fwd = b._strips = never
    if n == 513:
        for call, idea in ((forward, f), (backward, b)):
            with pytest.raises(AssertionError, match="the strips ran"):
                call(idea.SPANS, c)
    else:
        check_both((f, b), c)
