"""bench model: sizes of models, arithmetic of speeds, data, refused options, small runs. None asserts a time."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="torch")

from bpsfast.bench import training  # noqa: E402
from bpsfast.bench.cli import command  # noqa: E402
from bpsfast.bench.harness.samples import Row  # noqa: E402
from bpsfast.bench.training import Speed, backends, samples  # noqa: E402
from bpsfast.bench.training.models import MODELS, Shape, shape_of  # noqa: E402
from bpsfast.orchestration.errors import ConfigError  # noqa: E402
from bpsfast.tools.planner import catalog  # noqa: E402

#: Parameters in torchvision, transformers (BertForPreTraining, GPT2LMHeadModel), and in the planner's catalog.
PUBLISHED = {"resnet50": 25_557_032, "vgg16": 138_357_544, "bert-large": 336_226_108, "gpt2": 124_439_808,
             "transformer": 61_362_176, "ugatit": 670_761_088}


@pytest.mark.parametrize("name", MODELS)
def test_full_models_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        parameters = list(shape_of(name, "full").make().parameters())
    assert sum(parameter.numel() for parameter in parameters) == PUBLISHED[name]
    if name in ("resnet50", "vgg16", "ugatit"):  # in other models query, key and value may be one tensor
        assert sorted(parameter.numel() for parameter in parameters) == sorted(catalog.n_elements(name))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_small_models_learn(name: str, one_thread: None) -> None:
    torch.manual_seed(0)
    shape = shape_of(name, "small")
    net = shape.make()
    assert sum(parameter.numel() for parameter in net.parameters()) < PUBLISHED[name] / 100
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batch = next(samples.synthetic(shape, shape.batch, 0, "cpu"))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters()), "each counts in the loss"
    assert losses[-1] < losses[0]


def test_masked_words_are_not_read_and_later_ones_are_not_seen() -> None:
    torch.manual_seed(0)
    words = torch.randint(1000, (2, 32))
    bert, gpt2 = (shape_of(name, "small").make().eval() for name in ("bert-large", "gpt2"))
    other = words.clone()
    other[:, 3] = (other[:, 3] + 1) % 1000
    assert torch.equal(bert(words, words), bert(other, words)), "place 3 is masked"
    seen = words.clone().masked_fill(torch.arange(32) == 31, 5)
    assert torch.equal(gpt2(words, words), gpt2(seen, words)), "nobody follows the last word"


def test_the_speed_of_all_is_that_of_one_times_ranks() -> None:
    images = Speed(256 / 351, 256, 256)
    assert images.of_one == pytest.approx(351) and round(images.total) == 89_856
    assert images.text() == "one rank: 351 images/s; total of 256 ranks: 89,856 images/s"
    tokens = Speed(1 / 3, 8, 4, length=512)
    assert tokens.total == pytest.approx(3 * 8 * 512 * 4)
    assert tokens.text() == "one rank: 3 steps/s, 1.229e+04 tokens/s; total of 4 ranks: 49,152 tokens/s"


@pytest.mark.parametrize(("options", "text"), [
    ({"model": "alexnet"}, "'alexnet' is not among those that train: resnet50, vgg16, transformer"),
    ({"model": "gpt2", "backend": "bpsfast,mpi"}, "'mpi' is none of bpsfast, gloo, nccl, horovod"),
    ({"model": "gpt2", "backend": "nccl"}, "nccl averages on GPUs only: --device cuda"),
    ({"model": "gpt2", "size": "tiny"}, "size 'tiny' is none of small, full"),
    ({"model": "gpt2", "data": "/nowhere"}, "--data /nowhere: there is no such file"),
])
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        training.run(options)


def test_what_is_not_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, text in ((["--size", "full"], "torch sees no GPU here; --device cpu trains the full model even so"),
                          (["--device", "cuda"], "--device cuda: torch sees no GPU here")):
        found = CliRunner().invoke(command, ["model", "vgg16", *options])
        assert found.exit_code == 2 and len(found.output.strip().splitlines()) == 1 and text in found.output
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None if name == "horovod" else object())
    with pytest.raises(ConfigError, match="horovod is not installed"):
        backends.check("horovod")


IMAGES = Shape(lambda: torch.nn.Identity(), 2, pixels=4, n_classes=3)
WORDS = Shape(lambda: torch.nn.Identity(), 2, length=4, n_words=50)


def test_ranks_take_turns_in_an_npz_file_of_images(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    pixels = np.repeat(np.arange(7, dtype=np.uint8) * 30, 4 * 4 * 3).reshape(7, 4, 4, 3)
    np.savez(path, images=pixels, labels=np.arange(7) % 3)
    for rank in (0, 1):
        batches = samples.real(path, IMAGES, 2, rank, 2, "cpu")
        taken = [next(batches) for _ in range(3)]
        own = [rank, rank + 2, rank + 4]  # a seventh would leave one rank without any
        expected = [own[at % 3] for at in range(6)]
        assert torch.cat([labels for _, labels in taken]).tolist() == [index % 3 for index in expected]
        images = torch.cat([images for images, _ in taken])
        assert images.shape == (6, 3, 4, 4)
        assert images[:, 0, 0, 0].tolist() == pytest.approx([index * 30 / 63.75 - 2 for index in expected])


def test_sentences_are_the_first_words_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, tokens=np.arange(40, dtype=np.uint16).reshape(5, 8))
    words, labels = next(samples.real(path, WORDS, 2, 1, 2, "cpu"))
    assert words.tolist() == [[8, 9, 10, 11], [24, 25, 26, 27]] and torch.equal(labels, words)


def test_a_folder_has_a_folder_for_each_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow")
    for name, color in (("cats", (0, 255, 0)), ("dogs", (255, 0, 0))):
        (tmp_path / name).mkdir()
        for number in range(2):
            image.new("RGB", (8, 6), color).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    batches = samples.real(tmp_path, IMAGES, 2, 0, 1, "cpu")
    (cats, zeros), (dogs, ones) = next(batches), next(batches)
    assert zeros.tolist() == [0, 0] and ones.tolist() == [1, 1] and cats.shape == (2, 3, 4, 4)
    assert cats[0, :, 2, 2].tolist() == [-2, 2, -2] and dogs[1, :, 2, 2].tolist() == [2, -2, -2]


@pytest.mark.parametrize(("arrays", "shape", "text"), [
    ({"tokens": np.zeros((9, 3), int)}, WORDS, "expected tokens, integers (n, 4 or more); found tokens int64 (9, 3)"),
    ({"tokens": np.full((9, 4), 50)}, WORDS, "tokens are 50 to 50; this model knows 0 to 49"),
    ({"tokens": np.zeros((3, 4), int)}, WORDS, "has 3 samples; a batch of 2 for each of 2 ranks takes 4"),
    ({"labels": np.zeros(9, int)}, IMAGES, "found labels int64 (9,)"),
    ({"images": np.zeros((9, 4, 4, 3)), "labels": np.zeros(9, int)}, IMAGES, "found images float64 (9, 4, 4, 3)"),
    ({"images": np.zeros((9, 4, 4, 3), np.uint8), "labels": np.full(9, 3)}, IMAGES, "labels are 3 to 3; this model"),
    ({"images": np.array([None]), "labels": np.zeros(1, int)}, IMAGES, "cannot be read as arrays: Object arrays"),
])
def test_sets_that_do_not_fit_are_refused(arrays: dict[str, Any], shape: Shape, text: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(ConfigError, match=re.escape(text)):
        samples.real(tmp_path / "set.npz", shape, 2, 0, 2, "cpu")


def test_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set.csv").touch()
    with pytest.raises(ConfigError, match="or a folder with a folder of images for each class"):
        samples.real(tmp_path / "set.csv", IMAGES, 2, 0, 2, "cpu")
    with pytest.raises(ConfigError, match="this model trains on sentences"):
        samples.real(tmp_path, WORDS, 2, 0, 2, "cpu")
    for name in "abcd":
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="has 4 classes; this model knows 3"):
        samples.real(tmp_path, IMAGES, 2, 0, 2, "cpu")


def test_ranks_that_differ_are_told() -> None:
    chosen = training.settled({"model": "vgg16"})
    speed = training.speed(chosen, 0.5, 2)

    def record(*digests: tuple[int, str]) -> dict[str, Any]:
        row = Row(None, "step", 0, label="gloo", samples_s=[0.5])
        return training.record(chosen, row, speed, [[2.0, 1.0]] * 2, digests)

    assert training.weights_agree([{"bench": "model"}, record((2, "a"), (2, "a"))])
    assert not training.weights_agree([record((2, "a"), (2, "a")), record((2, "a"), (2, "b"))])
    said = training.text(chosen, [record((2, "a"), (2, "b"))], {"gloo": speed})
    assert "one rank: 32 images/s; total of 2 ranks: 64 images/s; loss 2 -> 1 in 2 steps; weights DIFFERENT on" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_small_run_on_real_data(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images[..., None] * 15.9).astype(np.uint8).repeat(3, axis=-1)
    np.savez(tmp_path / "digits.npz", images=pixels, labels=digits.target)
    records = training.run({"model": "vgg16", "backend": "bpsfast,gloo", "data": tmp_path / "digits.npz", "quick": True,
                            "json_path": str(tmp_path / "out.jsonl")})
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == json.loads(
        json.dumps(records))
    ours, gloo = (record["measured"] for record in records[1:])
    assert training.weights_agree(records) and len(ours["samples_s"]) == 2
    assert ours["losses"][0] == pytest.approx(gloo["losses"][0]), "the same weights and images"
    assert ours["total"] == pytest.approx(2 * 16 / ours["median_s"]) and ours["unit"] == "images/s"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_of_a_job_that_bpsfast_run_has_started() -> None:
    program = [sys.executable, "-m", "bpsfast.bench.training", "gpt2", "--warmup", "1", "--steps", "2", "--rounds", "2"]
    found = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--", *program], capture_output=True,
                           text=True, timeout=100, check=True)
    lines = [line for line in found.stdout.splitlines() if "tokens/s" in line]
    assert len(lines) == 3, "rank 0 alone tells of two rounds and of all"
    one, total = re.search(r"([\d.]+) steps/s.*total of 2 ranks: ([\d,]+) tokens/s", lines[-1]).groups()
    assert float(total.replace(",", "")) == pytest.approx(float(one) * 8 * 32 * 2, rel=2e-3)
