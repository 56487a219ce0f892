"""The training data of `bench model`: synthetic, or a real set from an .npz file or a folder of images."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bpsfast.bench.training.models import Shape
from bpsfast.orchestration.errors import ConfigError, LackingError

#: Number of different synthetic batches of a rank, which repeat.
_N_SYNTHETIC = 8
_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")

Batch = tuple[torch.Tensor, torch.Tensor]
Array = np.ndarray[Any, Any]


def synthetic(shape: Shape, batch: int, rank: int, device: str) -> Iterator[Batch]:
    """Yield endless batches of *rank*: normal pixels and labels, or words, made once on *device*."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1)
    made = []
    for _ in range(_N_SYNTHETIC):
        if shape.length:
            words = torch.randint(shape.n_words, (batch, shape.length), generator=generator).to(device)
            made.append((words, words))
        else:
            images = torch.randn((batch, 3, shape.pixels, shape.pixels), generator=generator)
            labels = torch.randint(shape.n_classes, (batch,), generator=generator)
            made.append((images.to(device), labels.to(device)))
    while True:
        yield from made


def real(path: Path, shape: Shape, batch: int, rank: int, n_ranks: int, device: str) -> Iterator[Batch]:
    """Return endless batches of the set at *path*: rank r takes samples r, r + n_ranks, ... in order, repeatedly.

    A folder has a folder of images for each class, by name (Pillow reads them in each step). An .npz file has `images`,
    uint8 (n, height, width, 3), and `labels`, integers (n,); or `tokens`, integers (n, length), of which the first
    words are used. Images are scaled to the model's pixels. Raises `ConfigError` if *path* is neither, does not fit the
    model, or has fewer samples for each rank than a batch; `LackingError` if Pillow is missing.
    """
    if path.is_dir():
        read, n = _folder(path, shape)
    elif path.suffix == ".npz" and path.is_file():
        read, n = _arrays(path, shape)
    else:
        raise ConfigError(f"--data {path}: expected an .npz file, or a folder with a folder of images for each class")
    if n // n_ranks < batch:
        raise ConfigError(f"--data {path} has {n} samples; a batch of {batch} for each of {n_ranks} ranks takes "
                          f"{batch * n_ranks}")
    return _in_turns(read, range(rank, n - n % n_ranks, n_ranks), batch, device)


def _in_turns(read: Callable[[Array], Batch], own: range, batch: int, device: str) -> Iterator[Batch]:
    indices, at = np.array(own), 0
    while True:
        inputs, labels = read(indices.take(range(at, at + batch), mode="wrap"))
        at = (at + batch) % len(indices)
        yield inputs.to(device), labels.to(device)


def _arrays(path: Path, shape: Shape) -> tuple[Callable[[Array], Batch], int]:
    try:
        with np.load(path) as kept:
            arrays = {name: kept[name] for name in ("images", "labels", "tokens") if name in kept}
    except (ValueError, OSError) as exc:  # the archive has pickled objects or is broken
        raise ConfigError(f"--data {path} cannot be read as arrays: {exc}") from None
    found = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items()) or "none of these"
    if shape.length:
        tokens = arrays.get("tokens")
        if tokens is None or tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.shape[1] < shape.length:
            raise ConfigError(f"--data {path}: expected tokens, integers (n, {shape.length} or more); found {found}")
        _check_range(path, "tokens", tokens, shape.n_words)
        words = torch.from_numpy(tokens[:, :shape.length].astype(np.int64))
        return lambda at: (words[at], words[at]), len(words)
    images, labels = arrays.get("images"), arrays.get("labels")
    if (images is None or labels is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3
            or labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]):
        raise ConfigError(f"--data {path}: expected images, uint8 (n, height, width, 3), and labels, integers (n,); "
                          f"found {found}")
    _check_range(path, "labels", labels, shape.n_classes)
    classes = torch.from_numpy(labels.astype(np.int64))
    return lambda at: (_pixels(images[at], shape.pixels), classes[at]), len(classes)


def _check_range(path: Path, name: str, values: Array, n: int) -> None:
    if values.size and not (0 <= values.min() and values.max() < n):
        raise ConfigError(f"--data {path}: {name} are {values.min()} to {values.max()}; this model knows 0 to {n - 1}")


def _folder(path: Path, shape: Shape) -> tuple[Callable[[Array], Batch], int]:
    if shape.length:
        raise ConfigError(f"--data {path} is a folder of images; this model trains on sentences: tokens in an "
                          ".npz file")
    try:
        from PIL import Image
    except ImportError:
        raise LackingError(f"--data {path}: images of a folder need Pillow (pip install pillow)") from None
    classes = sorted(each.name for each in path.iterdir() if each.is_dir())
    files = [(label, file) for label, name in enumerate(classes) for file in sorted((path / name).iterdir())
             if file.suffix.lower() in _ENDINGS]
    if len(classes) > shape.n_classes:
        raise ConfigError(f"--data {path} has {len(classes)} classes; this model knows {shape.n_classes}")

    def read(at: Array) -> Batch:
        found = []
        for index in at:
            with Image.open(files[index][1]) as image:
                found.append(_pixels(np.array(image.convert("RGB"))[None], shape.pixels))
        return torch.cat(found), torch.tensor([files[index][0] for index in at])

    return read, len(files)


def _pixels(images: Array, pixels: int) -> torch.Tensor:
    """Return images (n, 3, pixels, pixels), from about -2 to 2, for uint8 images (n, height, width, 3)."""
    found = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 63.75 - 2
    if found.shape[2:] == (pixels, pixels):
        return found
    return functional.interpolate(found, (pixels, pixels), mode="bilinear", antialias=True)
