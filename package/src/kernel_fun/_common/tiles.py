"""Descriptors of the tiles of a matrix, for the copy engine, without what Triton's constructor does on every call.

The constructor checks its arguments at length, some 5 us of host time where a kernel with eleven descriptors takes 50.
Here it checks the first descriptor of a kind; later ones are copies that differ in base and number of rows. They carry
what else a launch would ask, their `launch_kind`.
"""

import functools

from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .launch import tiles_kind

_checked: dict = {}  # (dtype, columns, block) -> the fields of a descriptor that the constructor has taken


def tiles(x, columns: int, rows_of_tile: int, columns_of_tile: int):
    """A descriptor of [rows_of_tile, columns_of_tile] tiles, in lines of 128 bytes, of a contiguous `x` of any shape
    as a matrix of `columns` columns.

    The copy engine takes a matrix at a multiple of 16 bytes alone. Another is copied, so one that is to be written
    must be fresh from torch.
    """
    size = x.numel()
    if x.data_ptr() % 16:
        x = x.clone()
    key = x.dtype, columns, rows_of_tile, columns_of_tile
    fields = _checked.get(key)
    if fields is None:
        fields = _checked[key] = _fields(_construct(x, *key[1:]))
    if not fields or not size or size % columns or not x.is_contiguous():
        return _construct(x, *key[1:])  # or its error
    made = object.__new__(TensorDescriptor)
    made.__dict__ = fields = fields.copy()
    fields["base"], fields["shape"] = x, (size // columns, columns)
    return made


def _construct(x, columns, rows_of_tile, columns_of_tile):
    block = [rows_of_tile, columns_of_tile]
    return TensorDescriptor.from_tensor(x.view(-1, columns), block, _in_lines(x.element_size()))


def _fields(made) -> dict:
    """What copies of a checked descriptor have in common, and their kind of launch; {} if it is not made of fields."""
    held = getattr(made, "__dict__", {})
    if not held.keys() >= {"base", "shape", "strides", "block_shape", "layout"}:
        return {}
    return {**held, "base": None, "launch_kind": tiles_kind(made)}


@functools.cache
def _in_lines(itemsize: int):
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)
