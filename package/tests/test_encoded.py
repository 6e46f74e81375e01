"""What a kernel's launcher receives when encodings are remembered is what Triton hands it, to the argument."""

from types import SimpleNamespace

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver as active

from kernel_fun._common import encoded
from kernel_fun._common.encoded import start_of
from kernel_fun._common.tiles import tiles

nvidia = pytest.importorskip("triton.backends.nvidia.driver", reason="descriptors are NVIDIA's")
pytestmark = pytest.mark.skipif(
    not hasattr(nvidia, "wrap_handle_tensordesc"), reason="this Triton launches in another way"
)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
TILES = "tensordesc<bf16[64, 64],L>"
SIGNATURE = {"x": "*bf16", "a": TILES, "b": TILES, "n": "i32", "K": "constexpr", "c": TILES, "y": "*fp32"}


@pytest.fixture
def filled(monkeypatch):
    """What has been encoded; the encoding is its own arguments."""
    calls = []

    def fill(*args):
        calls.append(args)
        return "map", args[0], *map(tuple, args[4:7])

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(active, "_active", SimpleNamespace(utils=utils), raising=False)
    return calls


def launcher(signature=SIGNATURE, metas=(META, META, META)):
    """(Triton's launcher of a kernel that has been compiled, what that hands on)."""
    handed = []
    run = object.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.arg_annotations, run.kernel_signature = "annotations", b"signature"
    run.launch = nvidia.wrap_handle_tensordesc(lambda *args: handed.append(args), signature, metas and list(metas))
    return run, handed


def arguments(rows=100, x=None):
    x = torch.zeros(rows, 128, dtype=torch.bfloat16) if x is None else x
    ordinary = TensorDescriptor.from_tensor(x, [64, 64], tiles(x, 128, 64, 64).layout)
    return x, tiles(x, 128, 64, 64), ordinary, 7, 128, tiles(x, 64, 64, 64), None


def call(run, args):
    run(2, 3, 1, 99, 11, (4, 1, 0), None, None, None, *args)


def test_the_same_arguments_are_handed_on(filled):
    run, handed = launcher()
    start = start_of(run)
    assert start is not run
    for rows in (100, 64, 100):
        args = arguments(rows)
        call(run, args)
        for _ in range(2):
            call(start, args)
            assert handed[-1] == handed[-2]
    assert len(handed) == 9


def test_a_matrix_is_encoded_once_for_a_place(filled):
    start = start_of(launcher()[0])
    args = arguments()
    for count, x in ((3, args[0]), (3, args[0]), (6, args[0].clone()), (9, args[0][:50])):
        call(start, arguments(x=x))
        assert len(filled) == count
    nan = TensorDescriptor.from_tensor(args[0], [64, 64], args[1].layout, padding="nan")
    call(start, (*args[:2], nan, *args[3:]))
    assert len(filled) == 10


def test_no_tensor_is_kept_and_no_more_than_so_many_encodings(filled, monkeypatch):
    monkeypatch.setattr(encoded, "MOST", 2)
    run, handed = launcher()
    start, x = start_of(run), torch.zeros(10, 128, dtype=torch.bfloat16)
    for rows in (1, 2, 3, 1, 2, 3):
        args = arguments(x=x[:rows])
        call(run, args)
        call(start, args)
        assert handed[-1] == handed[-2]
    kept = dict(zip(start.launch.__code__.co_freevars, start.launch.__closure__, strict=True))["expand"].cell_contents
    places = dict(zip(kept.__code__.co_freevars, kept.__closure__, strict=True))["places"].cell_contents
    assert [len(known) for _, _, known in places] == [2, 2, 2]
    assert not any(torch.is_tensor(x) for _, _, known in places for made in known.values() for x in made)


def test_what_is_built_in_another_way_is_started_as_it_is(filled):
    """Without descriptors; with some that the kernel takes apart; by what is no wrapper of Triton's."""
    plain = SimpleNamespace(launch=print)
    without = launcher({"x": "*bf16"}, None)[0]
    apart = launcher(metas=None)[0]
    other = SimpleNamespace(launch=lambda *args: None)
    for run in (plain, without, apart, other, print):
        assert start_of(run) is run
