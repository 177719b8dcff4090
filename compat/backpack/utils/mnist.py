"""MNIST without torchvision: finds, downloads, checks and reads the files. Imports torch only.

Files lie where torchvision puts them, so that both share one copy.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import struct
import sys
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, TensorDataset

from backpack_core.errors import BackpackWarning, MissingPluginError

MEAN, DEVIATION = 0.1307, 0.3081
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# File of the training set: MD5 of the compressed file.
FILES = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
}
_BLOCK = 2**16
_TIMEOUT = 10.0


class NoCopyError(OSError):
    """There is neither a copy of a file nor a network to get one from."""


def training_set(root: Path) -> Dataset[Any]:
    """The normalised training images ``[1, 28, 28]`` with labels, or a stand-in.

    Args:
        root: Folder for the files.

    Returns:
        MNIST; if it is not available, scikit-learn's digits resized to 28x28, with a warning.
    """
    try:
        return _with_torchvision(root) or TensorDataset(*read(root))
    except (NoCopyError, RuntimeError, urllib.error.URLError) as error:
        reason = str(error).split("\n", 1)[0]
        warnings.warn(
            f"MNIST is not available: there is no copy in {root} and no network to get one from "
            f"({reason}). Using scikit-learn's 1797 digits, resized to 28x28, instead.",
            BackpackWarning,
            stacklevel=4,
        )
        return TensorDataset(*_digits())


def _with_torchvision(root: Path) -> Dataset[Any] | None:
    if importlib.util.find_spec("torchvision") is None:
        return None
    from torchvision import transforms  # type: ignore[import-not-found, unused-ignore]
    from torchvision.datasets import MNIST  # type: ignore[import-not-found, unused-ignore]

    steps = [transforms.ToTensor(), transforms.Normalize((MEAN,), (DEVIATION,))]
    found: Dataset[Any] = MNIST(
        root=str(root), train=True, transform=transforms.Compose(steps), download=True
    )
    return found


def read(root: Path) -> tuple[Tensor, Tensor]:
    """Images ``[N, 1, 28, 28]``, normalised, and labels ``[N]``; downloaded if missing.

    Args:
        root: Folder for the files.

    Raises:
        NoCopyError: A file is not there, and no mirror can be reached.
    """
    folder = root / "MNIST" / "raw"
    pixels, labels = (_parse(_content(folder, name)) for name in FILES)
    images = pixels.unsqueeze(1).float().div_(255).sub_(MEAN).div_(DEVIATION)
    return images, labels.long()


def _content(folder: Path, name: str) -> bytes:
    """A file's bytes: from its uncompressed or compressed copy, or from a mirror."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        return plain.read_bytes()
    if not (packed.exists() and _md5(packed) == FILES[name]):
        _download(packed, FILES[name])
    return gzip.decompress(packed.read_bytes())


def _download(target: Path, checksum: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    failures = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(mirror + target.name, timeout=_TIMEOUT) as response:
                size = int(response.headers.get("Content-Length") or 0)
                with part.open("wb") as file:
                    _copy(response, file, target.name, size)
        except OSError as error:
            failures.append(f"{mirror}: {error}")
            continue
        if _md5(part) == checksum:
            part.replace(target)
            return
        failures.append(f"{mirror}: the file's checksum is wrong")
    part.unlink(missing_ok=True)
    raise NoCopyError("; ".join(failures))


def _copy(source: Any, file: BinaryIO, name: str, size: int) -> None:
    """Copy in blocks, with a progress bar on a terminal."""
    done = 0
    while block := source.read(_BLOCK):
        file.write(block)
        done += len(block)
        if size and sys.stderr.isatty():
            filled = 30 * done // size
            sys.stderr.write(f"\r{name} [{'#' * filled:<30}] {100 * done // size:3d} %")
    if size and sys.stderr.isatty():
        sys.stderr.write("\n")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _parse(content: bytes) -> Tensor:
    """The IDX format: two zeros, the type (8: bytes), the number of axes, the sizes, the data."""
    zeros, kind, axes = struct.unpack(">HBB", content[:4])
    if zeros or kind != 8:
        raise NoCopyError(f"not an IDX file of bytes: it begins with {content[:4].hex()}")
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    data = bytearray(content[4 + 4 * axes :])
    return torch.frombuffer(data, dtype=torch.uint8).reshape(shape)


def _digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingPluginError(
            "MNIST is not available, and neither is scikit-learn, whose digits would stand in: run "
            "`pip install scikit-learn`, or put the files of MNIST into ./data/MNIST/raw."
        ) from error
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    return (images - MEAN) / DEVIATION, torch.as_tensor(digits.target, dtype=torch.long)
