"""DDP and FSDP2 with the example's two-layer model: the losses of one process, and no hang."""
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples come with the source tree, not with the wheel", allow_module_level=True)

WORKER = """
    import json, os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import train_recall

    rank, parallel, kind, settings = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(device)
    if parallel != "none":
        backend, patience = "nccl" if kind == "cuda" else "gloo", timedelta(seconds=90)
        dist.init_process_group(backend, rank=rank, world_size=2, timeout=patience)
    print(json.dumps(train_recall.train(device=device, parallel=None if parallel == "none" else parallel, **settings)))
    if parallel != "none":
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 now and then aborts when the interpreter ends after DDP over gloo, whatever the model
"""


def losses(parallel, kind, settings, seconds):
    """The loss of every step: of one process for "none", else of both of two, which must agree."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]), "MASTER_PORT": str(port),
                   "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", textwrap.dedent(WORKER)]
    workers = [
        subprocess.Popen([*words, str(rank), parallel, kind, json.dumps(settings)], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(1 if parallel == "none" else 2)
    ]
    try:
        said = [worker.communicate(timeout=seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, said, strict=True):
        assert worker.returncode == 0, errors[-2000:]
    found = [json.loads(out.strip().splitlines()[-1]) for out, _ in said]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_cpu_processes_train_as_one(parallel):
    settings = {"steps": 3, "width": 32, "heads": 2, "size": 4, "pairs": 8, "rate": 1e-2}
    want, got = (losses(how, "cpu", settings, 120) for how in ("none", parallel))
    assert got == pytest.approx(want, rel=1e-5)
    assert abs(want[2] - want[0]) > 1e-3 * want[0]  # the weights have moved, so the later losses tell of the gradients


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_gpus_train_as_one(parallel):
    """Over NCCL, with the kernels. Matrix products of half the rows may round differently, so not to the bit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    settings = {"steps": 10, "width": 256, "heads": 2, "size": 32, "pairs": 32}
    want, got = (losses(how, "cuda", settings, 500) for how in ("none", parallel))
    assert got == pytest.approx(want, rel=1e-2)
    assert abs(want[-1] - want[0]) > 1e-2 * want[0]
