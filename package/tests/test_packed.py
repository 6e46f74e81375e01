"""Chunk tables of packed calls: right, never stale, and gone with their tensor."""
import gc

import pytest
import torch
from small_inputs import conv, conv_definition, kda, recurrence, rms

from kernel_fun._common import packed
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda


def test_tables_are_flas():
    from fla.ops.utils import prepare_chunk_indices, prepare_chunk_offsets

    for lengths in ([5, 64, 0, 200], [1], [0, 0], [64, 65]):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        got = packed.describe(cu)
        assert torch.equal(got.chunk_indices, prepare_chunk_indices(cu, 64))
        assert torch.equal(got.chunk_offsets, prepare_chunk_offsets(cu, 64))
        assert (got.N, got.NT, got.total) == (len(lengths), got.chunk_indices.shape[0], sum(lengths))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_tables_are_of_one_kind_whatever_the_callers_integers(dtype):
    cu = torch.tensor([0, 30, 70], dtype=dtype)
    tables = packed.describe(cu)[-3:]
    assert [t.dtype for t in tables] == [torch.int64] * 3
    assert [t.tolist() for t in tables] == [[0, 30, 70], [[0, 0], [1, 0]], [0, 1, 2]]
    assert tables[0] is not cu


def test_a_change_in_place_is_seen():
    cu = torch.tensor([0, 30, 70])
    first = packed.describe(cu)
    assert packed.describe(cu) is first
    cu[1] = 65
    second = packed.describe(cu)
    assert first.chunk_indices.tolist() == [[0, 0], [1, 0]]
    assert second.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0]]


def unseen(t, split):
    """A write that leaves the version counter where it is, as numpy's and a broadcast's do."""
    before = t._version
    t.numpy()[1] = split
    assert t._version == before


def test_a_change_that_torch_does_not_count_is_seen_where_it_can_be_read():
    cu = torch.tensor([0, 30, 70])
    assert packed.describe(cu).NT == 2
    unseen(cu, 65)
    assert packed.describe(cu).NT == 3
    elsewhere, host = torch.zeros(3, dtype=torch.int64, device="meta"), torch.tensor([0, 30, 70])
    first = packed.describe(elsewhere, host)
    assert packed.describe(elsewhere, host.clone()) is first  # another copy of the same values
    unseen(host, 65)
    assert packed.describe(elsewhere, host).NT == 3
    both = torch.tensor([0, 30, 70]), torch.tensor([0, 30, 70])
    packed.describe(*both)
    for n in (1, 0):  # a copy that no longer is one, whichever of the two was written
        unseen(both[n], 65)
        with pytest.raises(ValueError, match="the one must be a copy of the other"):
            packed.describe(*both)
        unseen(both[n], 30)


def test_a_write_while_the_values_are_read_is_not_taken_for_read(monkeypatch):
    cu, tables = torch.tensor([0, 30, 70]), packed._tables

    def slow(host, like):
        cu.add_(0)
        return tables(host, like)

    monkeypatch.setattr(packed, "_tables", slow)
    first = packed.describe(cu)
    assert packed.describe(cu) is not first


def test_the_hosts_word_is_taken_for_its_own_call_only():
    """Without the copy the tensor itself is read: here a stand-in that says where it would wait."""
    cu, host = torch.zeros(3, dtype=torch.int64, device="meta"), torch.tensor([0, 30, 70])
    packed.describe(cu, host)
    with pytest.raises(NotImplementedError):
        packed.describe(cu)
    with pytest.raises(NotImplementedError):
        packed.describe(cu, host.to("meta"))  # no copy on the host


def test_operators_follow_a_change_in_place():
    tensors, flags = kda(sequences=(30, 40), T=70, grad=False)
    c, cf = conv(sequences=(30, 40), T=70)
    for split in (30, 65, 1):
        flags["cu_seqlens"][1] = split
        cf["cu_seqlens"][1] = split
        assert rms(chunk_kda(**tensors, **flags)[0], recurrence(**tensors, **flags)[0]) < 1e-10
        assert rms(causal_conv1d(**c, **cf)[0], conv_definition(**c, **cf)[0]) < 1e-10


def test_the_host_copy_is_used_and_watched_too():
    """`cu` has no values to read here, as on a GPU that nobody waits for."""
    cu, host = torch.tensor([0, 30, 70], device="meta"), torch.tensor([0, 30, 70])
    assert packed.describe(cu, host).NT == 2
    host[1] = 65
    assert packed.describe(cu, host).NT == 3


def test_another_host_copy_at_the_same_address_is_another():
    cu = torch.tensor([0, 30, 70], device="meta")
    for n in range(8):  # each host copy is freed before the next is made, whose id is then often the same
        first, chunks = ((30, 2), (65, 3))[n % 2]
        assert packed.describe(cu, torch.tensor([0, first, 70])).chunk_indices.shape == (chunks, 2)


def test_inference_tensors_are_never_remembered():
    with torch.inference_mode():
        cu = torch.tensor([0, 30, 70])
        assert packed.describe(cu).NT == 2
        cu[1] = 65
        assert packed.describe(cu).NT == 3


def test_tables_go_with_their_tensor():
    before = len(packed._cache)
    cu = torch.tensor([0, 30, 70])
    packed.describe(cu)
    assert len(packed._cache) == before + 1
    del cu
    gc.collect()
    assert len(packed._cache) == before


@pytest.mark.parametrize("bad", [[0], [[0, 1]], [0.0, 1.0], [0, 5, 4], [-1, 4]])
def test_bad_values_are_named(bad):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        packed.describe(torch.tensor(bad))


@pytest.mark.parametrize("operator", [chunk_kda, causal_conv1d])
def test_a_host_copy_that_is_none_is_named(operator):
    tensors, flags = (kda if operator is chunk_kda else conv)(sequences=(30, 40), T=70)
    want = operator(**tensors, **flags)[0]
    assert torch.equal(operator(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0, 30, 70]).int())[0], want)
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu is \[0, 20, 70\], cu_seqlens \[0, 30, 70\]: the one must"):
        operator(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0, 20, 70]))
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu is \[4\], cu_seqlens \[3\]: the one must be a copy"):
        operator(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0, 20, 30, 70]))


def test_a_host_copy_is_held_to_the_tokens_and_the_shape_without_a_wait():
    """As on a GPU: `cu` has no values to read, so reading them would be an error of its own."""
    x, cu = torch.zeros(1, 70, 6, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")
    assert packed.of_call("x", x, cu, torch.tensor([0, 30, 70])).total == 70
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu .as cu_seqlens should. ends at 71, but x has T=70"):
        packed.of_call("x", x, cu, torch.tensor([0, 30, 71]))
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu is \[2\], cu_seqlens \[3\]"):
        packed.of_call("x", x, cu, torch.tensor([0, 70]))


@pytest.mark.parametrize("ordinary", [True, False])
def test_an_evaluation_first_and_a_training_step_then(ordinary):
    """Tables that inference_mode made would not be saved for a backward."""
    with torch.inference_mode(not ordinary):
        cu_seqlens = torch.tensor([0, 50, 128])
    with torch.inference_mode():
        packed.describe(cu_seqlens)
    tables = packed.describe(cu_seqlens)
    assert not any(t.is_inference() for t in (tables.chunk_indices, tables.chunk_offsets))
    assert not tables.cu_seqlens.is_inference()


def test_a_host_copy_of_another_width_keeps_the_tables():
    cu_seqlens, host = torch.tensor([0, 50, 128], dtype=torch.int32), torch.tensor([0, 50, 128])
    assert packed.describe(cu_seqlens, host) is packed.describe(cu_seqlens, host)
