"""fla's recorded results against the oracle and the reference chain, at fla's own tolerances; and the recorder
itself."""

import numpy as np
import pytest
import torch

from loop import compare, controls, golden, oracle

IDS = [case.id for case in golden.CASES]
RECORDED = sorted(golden.FOLDER.glob("*.npz"))


@pytest.mark.parametrize("case", golden.CASES, ids=IDS)
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_fla_agrees_with_the_definition(case, form):
    if not RECORDED:
        pytest.skip("no golden data yet: record it on a GPU with python -m loop.golden")
    theirs, _ = golden.load(case)  # from here on a missing file is a failure
    x = golden.given(case)
    truth = getattr(oracle, form)(x)
    assert set(theirs) == {n for n, t in truth.items() if t is not None}
    terms = oracle.term_sizes(x, truth)
    for name, got in theirs.items():
        found = compare.judge(
            case.family, name, case.problem(), [compare.difference(got, truth[name], terms.get(name))]
        )
        assert found.ok, str(found)


def test_the_folder_is_complete_and_small():
    if not RECORDED:
        pytest.skip("no golden data yet: record it on a GPU with python -m loop.golden")
    assert [p.stem for p in RECORDED] == sorted(IDS)
    assert sum(p.stat().st_size for p in RECORDED) <= golden.MAX_BYTES
    for case in golden.CASES:
        assert golden.load(case)[1]["versions"]["device"] != "cpu"


def test_recording_and_loading_keep_every_bit(tmp_path):
    """The recorder, with the reference chain in fla's place."""
    files = golden.record(tmp_path, lambda family: controls.honest(family).op, "cpu")
    assert [f.stem for f in files] == IDS
    assert sum(f.stat().st_size for f in files) < golden.MAX_BYTES
    for case in golden.CASES:
        found, meta = golden.load(case, tmp_path)
        again = golden.inputs.run(controls.honest(case.family).op, golden.given(case))
        assert meta["versions"]["device"] == "cpu"
        for name, t in again.items():
            assert compare.same_bits(t, found.get(name)), f"{case.id} {name}"


def test_data_of_another_case_or_a_bad_result_is_refused(tmp_path):
    case = golden.CASES[0]
    np.savez_compressed(tmp_path / f"{case.id}.npz", _meta='{"sha": "0", "seed": 0}')
    with pytest.raises(ValueError, match="recorded for another case"):
        golden.load(case, tmp_path)

    def broken(family):
        return lambda x, grad: (x["v" if family == "kda" else "x"] * torch.nan, None)

    with pytest.raises(RuntimeError, match="is not finite"):
        golden.record(tmp_path, broken, "cpu")


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: main() would record")
    assert golden.main([]) == 1
    assert capsys.readouterr().err.strip() == "golden data comes from fla, which needs a GPU; torch finds none here"
