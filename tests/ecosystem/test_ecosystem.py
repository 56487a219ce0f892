"""The examples that name the backend "bpsfast": under torchrun, with two ranks, by each library that is installed."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRON = {**os.environ, "BPSFAST_TORCH_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
           "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
LIMIT_S = 240

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


def output(command):
    """Return what *command* says; it must end by itself, and well."""
    process = subprocess.Popen(command, env=ENVIRON, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except BaseException:
        process.terminate()  # torchrun ends its workers
        process.wait(30)
        raise
    assert process.returncode == 0, said
    return said


def by_torchrun(name, *arguments, size=2):
    return output([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
                   str(EXAMPLES / name), *arguments])


def needs(*modules):
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install '.[ecosystem]'")


def weights(said):
    return dict(re.findall(r"rank (\d): weights ([0-9a-f]{16})", said))


def read_right(said):
    return float(re.search(r"([\d.]+)% of ", said[said.rindex("% of ") - 8:])[1])


@pytest.fixture(scope="module")
def digits_by_torchrun():
    return by_torchrun("mnist_ddp.py")


def test_digits_by_ddp(digits_by_torchrun):
    assert read_right(digits_by_torchrun) > 80
    found = weights(digits_by_torchrun)
    assert set(found) == {"0", "1"} and found["0"] == found["1"]


def test_digits_by_ray_have_the_same_bits(digits_by_torchrun):
    needs("ray", "pandas", "pyarrow")
    said = output([sys.executable, str(EXAMPLES / "mnist_ray.py")])
    assert weights(said) == weights(digits_by_torchrun), said


def test_a_small_gpt():
    said = by_torchrun("char_gpt.py", "--steps", "30", "--evaluate-every", "15", "--accumulate", "2")
    losses = [float(loss) for loss in re.findall(r"on unseen text ([\d.]+)", said)]
    assert len(losses) == 2 and losses[1] < losses[0] < 4.6, said
    assert re.search("it writes: .Return ", said), said


@pytest.mark.parametrize(("name", "modules"), [
    ("mnist_lightning.py", ["lightning"]), ("mnist_accelerate.py", ["accelerate"]),
    ("mnist_hf_trainer.py", ["transformers", "accelerate"])])
def test_digits_by(name, modules):
    needs(*modules)
    said = by_torchrun(name)
    assert "bpsfast: " in said and read_right(said) > 60, said


def test_digits_by_torchft_whose_replicas_are_lost_and_come_back():
    needs("torchft")
    said = output([sys.executable, str(EXAMPLES / "mnist_torchft.py")])
    found = re.findall(r"replica (\d): weights ([0-9a-f]{16}), ([\d.]+)%", said)
    assert {number for number, _, _ in found} == {"0", "1", "2"} and len({digest for _, digest, _ in found}) == 1, said
    assert min(float(share) for _, _, share in found) > 60, said
    assert "of 3 replicas" in said and "replica 2 is lost" in said, said
    assert re.search(r"replica 0: step \d+ of 2 replicas", said), "nobody trained on without it"
