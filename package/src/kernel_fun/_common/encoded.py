"""Starts of compiled kernels that remember how a descriptor is encoded.

Triton encodes each tensor descriptor for the copy engine at each launch, and walks all arguments to find them: of the
host's time for a short sequence a tenth. An encoding says where a matrix lies, its shape and its tiles, no more, and
training finds its matrices where they were a step ago.
"""

import copy

MOST = 256  # encodings kept for one argument of one kernel


def _place(x) -> tuple:
    """All that an encoding depends on but for what is compiled for: type, tiles and layout. Of a descriptor made by
    `tiles` address and shape are."""
    return x.base.data_ptr(), *x.shape, *x.strides, x.padding, getattr(x, "round_f32_to_tf32", False)


def start_of(run):
    """What takes the arguments of `run`, a CompiledKernel's, and does the same: a copy of Triton's launcher in which
    only the encoding is replaced, or `run` as it is where that is not built as this file knows it."""
    try:
        inner = run.launch
        names, cells, used = inner.__code__.co_freevars, inner.__closure__, inner.__code__.co_names
        encode, base = inner.__globals__["make_tensordesc_arg"], inner.__globals__.get("_BASE_ARGS_FORMAT_LEN")
        held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        launcher, places, metas = (held[name] for name in ("launcher", "tensordesc_indices", "tensordesc_meta"))
        places = [(i, meta, {}) for i, meta in zip(sorted(places), metas, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError):
        return run  # for one without descriptors, which is not wrapped
    if len(held) != 3 or "make_tensordesc_arg" not in used or None in metas:
        return run

    def expand(args):
        """`args` with each descriptor replaced by what Triton makes of it."""
        out, done = [], 0
        for i, meta, known in places:
            x = args[i]
            place = getattr(x, "place", None) or _place(x)
            found = known.get(place)
            if found is None:
                if len(known) >= MOST:
                    known.clear()
                found = known[place] = encode(x, meta)
            out += args[done:i]
            out += found
            done = i + 1
        out += args[done:]
        return out

    mine = copy.copy(run)
    if "_BASE_ARGS_FORMAT_LEN" in used:  # Triton 3.6: all arguments in one row
        mine.launch = lambda *args: launcher(*args[:base], *expand(args[base:]))
    else:  # 3.7: the kernel's in one tuple, the last
        mine.launch = lambda *args: launcher(*args[:-1], expand(args[-1]))
    return mine
