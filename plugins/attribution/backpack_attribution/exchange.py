"""Stores of other programs: Bergson's directory and dattri-LLM's memory map.

The formats follow the source of Bergson 2.5.1 (``bergson/data.py``) and dattri-LLM 0.1.0
(``dattri_llm/gradient/storage_manager.py``). These programs are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backpack_attribution import forms
from backpack_attribution.disk import atomically, write_json
from backpack_attribution.forms import Value
from backpack_attribution.identities import Identity, bytes_of
from backpack_attribution.shard import Block
from backpack_attribution.store import GradientStore
from backpack_core.errors import UsageError
from backpack_firstorder import SampleGradients

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_PROCESSOR = {
    "projection_dim": None,
    "reshape_to_square": False,
    "projection_type": "rademacher",
    "projection_target": "per_module",
    "projection_scale": "jl",
    "include_bias": False,
    "projection_seed": None,
    "projection_version": 2,
}
_FORMAT = 2  # of dattri-LLM's memory map, and of its index


def write_bergson(
    store: GradientStore, folder: str | Path, tokens: Sequence[int] | None = None
) -> None:
    """Write the rows of a store as a directory of Bergson.

    ``gradients.bin`` has a row for each sample, with one part after the other; ``info.json`` has
    the width of each part, and also the identities, which Bergson ignores. Its ``Attributor`` opens
    the directory, and its searches give the results of :meth:`GradientStore.search`.

    Args:
        store: What to write. Rows of low rank are written as full matrices.
        folder: Where to write it. It is made if its parent exists.
        tokens: If rows are tokens: the number of consecutive rows of each document. This adds a
            file ``offsets.npy``. Default: a row is a document.

    Raises:
        UsageError: The store is empty, or its number of rows is not the number of tokens.
    """
    folder, rows = Path(folder), len(store)
    if not rows:
        raise UsageError(f"{store.folder} has no samples yet: append some first.")
    if tokens is not None and sum(tokens) != rows:
        raise UsageError(f"tokens= adds up to {sum(tokens)}, but the store has {rows} rows.")
    folder.mkdir(exist_ok=True)
    atomically(folder / "gradients.bin", lambda path: _write_rows(store, path))
    if tokens is not None:
        import numpy

        ends = numpy.cumsum([0, *tokens], dtype=numpy.int64)
        numpy.save(folder / "offsets.npy", ends)
    info = {
        "attribute_tokens": tokens is not None,
        "num_items": rows if tokens is None else len(tokens),
        "num_grads": rows,
        "grad_sizes": {name: shape.numel() for name, shape in store.shapes.items()},
        "base_dtype": str(store.dtype).removeprefix("torch."),
        "identities": store.identities,
    }
    write_json(folder / "info.json", info)
    # Bergson's queries ask how gradients were made: without its own projections and
    # preconditioners. This does not change rows. JSON is YAML, too.
    write_json(folder / "processor_config.yaml", _PROCESSOR)
    for name in ("normalizers", "hessians", "hessians_eigen"):
        atomically(folder / f"{name}.pth", lambda path: torch.save({}, path))


def _write_rows(store: GradientStore, path: Path) -> None:
    with path.open("wb") as file:
        for block in store.blocks():
            flat = [forms.flat(forms.dense(block.gradients[name])) for name in store.shapes]
            file.write(bytes_of(torch.cat(flat, 1)))


def read_bergson(folder: str | Path, rows: int = 4096) -> Iterator[Block]:
    """The rows of a directory of Bergson, some at a time, mapped from disk.

    Append them to a :class:`GradientStore`, which checks them like its own. Rows of tokens have the
    identities ``"DOCUMENT:TOKEN"``; their sum is the gradient of the document.

    Args:
        folder: A folder with ``gradients.bin`` and ``info.json``.
        rows: The largest number of rows at a time.

    Raises:
        UsageError: The directory is not one of Bergson.
    """
    folder = Path(folder)
    try:
        info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
        sizes: dict[str, int] = info["grad_sizes"]
        dtype, count = _DTYPES[info["base_dtype"]], info["num_grads"]
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"{folder} is not a directory of gradients of Bergson 2.5 or later: "
            f"{type(error).__name__}: {error}."
        ) from error
    width, names = sum(sizes.values()), _names(folder, info)
    whole = _mapped(folder / "gradients.bin", dtype, count * width).reshape(count, width)
    for first in range(0, count, rows):
        part = whole[first : first + rows]
        pieces = part.split([*sizes.values()], dim=1)
        yield Block(names[first : first + rows], dict(zip(sizes, pieces, strict=True)))


def _names(folder: Path, info: Mapping[str, Any]) -> list[Identity]:
    if "identities" in info:
        return [*info["identities"]]
    if not info.get("attribute_tokens"):
        return [*range(info["num_grads"])]
    import numpy

    counts = numpy.diff(numpy.load(folder / "offsets.npy")).tolist()
    return [f"{doc}:{token}" for doc, count in enumerate(counts) for token in range(count)]


def write_dattri(
    store: GradientStore,
    folder: str | Path,
    layer_types: Mapping[str, str] | None = None,
    rows: int = 4096,
) -> None:
    """Write the rows of a store as a store of dattri-LLM, in its memory-mapped format.

    Every block of rows is a record of materialised layers; their names are those of the parts.

    Args:
        store: What to write. Rows of low rank are written as full matrices.
        folder: Where to write it. It is made if its parent exists.
        layer_types: The layer type of each part for dattri-LLM, such as ``"nn.LayerNorm"``;
            default: ``"nn.Linear"``, which for materialised gradients means flat inner products.
        rows: The number of samples in a record.
    """
    folder, types = Path(folder), layer_types or {}
    folder.mkdir(exist_ok=True)
    settings = {"format": _FORMAT, "sample_id_key": None, "gradient_accumulation_steps": 1}
    write_json(folder / "index_meta.json", settings)
    lines = []
    for number, block in enumerate(store.blocks(rows)):
        handle = f"batch_{number:06d}.mmap"
        names = [*map(str, block.identities)]
        record = {
            "step": 0,
            "input_hash": names,
            "sample_id_key": None,
            "representation": dict.fromkeys(store.shapes, "materialized"),
            "layer_types": {name: types.get(name, "nn.Linear") for name in store.shapes},
            "indexing": dict.fromkeys(store.shapes, "batch"),
        }
        dense = {name: forms.dense(block.gradients[name]) for name in store.shapes}
        _write_record(folder / handle, record, dense)
        records = [{"idx": 0, "step": 0, "hashes": names}]
        lines.append(json.dumps({"file": handle, "records": records}, separators=(",", ":")))
    text = "".join(f"{line}\n" for line in lines)
    atomically(folder / "index.jsonl", lambda path: path.write_text(text, encoding="utf-8"))


def _write_record(handle: Path, record: dict[str, Any], dense: Mapping[str, Tensor]) -> None:
    layers, offset = {}, 0
    with Path(f"{handle}.bin").open("wb") as file:
        for name, tensor in dense.items():
            raw = bytes_of(tensor)
            spec = {
                "byte_off": offset,
                "nbytes": len(raw),
                "shape": [*tensor.shape],
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            layers[name] = {"kind": "dense", "parts": {"data": spec}}
            padded = raw + bytes(-len(raw) % 8)  # aligned for views of every dtype
            offset += file.write(padded)
    torch.save({"format": _FORMAT, "records": [{**record, "layers": layers}]}, f"{handle}.meta")


def read_dattri(folder: str | Path) -> Iterator[Block]:
    """The records of a store of dattri-LLM in its memory-mapped format, mapped from disk.

    Factorised linear layers, ``Σ_t g[n, t] a[n, t]ᵀ``, are read as ``SampleGradients``. Samples
    keep their identifiers, which are texts there. Records of several ranks follow each other.

    Args:
        folder: A folder with ``index.jsonl``, or with folders ``rank_N`` that have one.

    Raises:
        UsageError: The folder is not one of dattri-LLM, a record is pickled, or a layer has a form
            that cannot be read.
    """
    folder = Path(folder)
    logs = [path for path in (folder, *sorted(folder.glob("rank_*"))) if path.is_dir()]
    logs = [path / "index.jsonl" for path in logs if (path / "index.jsonl").exists()]
    if not logs:
        raise UsageError(f"{folder} is not a store of dattri-LLM: it has no index.jsonl.")
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            handle = json.loads(line)["file"]
            if not handle.endswith(".mmap"):
                raise UsageError(
                    f"{handle} is a pickle, which could run code when it is read, so it is "
                    'refused: store with disk_format="memmap".'
                )
            yield from _records(folder / handle)


def _records(handle: Path) -> Iterator[Block]:
    about = torch.load(f"{handle}.meta", weights_only=True)
    if about.get("format") != _FORMAT:
        raise UsageError(f"{handle} has the format {about.get('format')}, not {_FORMAT}.")
    path = Path(f"{handle}.bin")
    whole = _mapped(path, torch.uint8, path.stat().st_size)
    for record in about["records"]:
        names = record["input_hash"]
        names = [*names] if isinstance(names, list) else [names]
        values = {
            name: _layer(whole, layer, record["layer_types"][name], name)
            for name, layer in record["layers"].items()
        }
        yield Block(names, values)


def _layer(whole: Tensor, layer: Mapping[str, Any], kind: str, name: str) -> Value:
    def part(key: str) -> Tensor:
        spec = layer["parts"][key]
        raw = whole[spec["byte_off"] : spec["byte_off"] + spec["nbytes"]]
        return raw.view(getattr(torch, spec["dtype"])).reshape(spec["shape"])

    if layer["kind"] == "dense":
        return part("data")
    inputs, outputs = part("activation"), part("pre_activation_grad")
    if kind != "nn.Linear" or not layer["batch_first"] or inputs.dim() not in (2, 3):
        raise UsageError(
            f"The layer {name!r} ({kind}) is stored by its factors, in a form that can be read "
            "only for nn.Linear: let dattri-LLM materialise it."
        )
    out, inp = (t.unsqueeze(1) if t.dim() == 2 else t for t in (outputs, inputs))
    return SampleGradients.from_factors(out, inp)


def _mapped(path: Path, dtype: torch.dtype, count: int) -> Tensor:
    wanted = count * dtype.itemsize
    if path.stat().st_size != wanted:
        raise UsageError(f"{path} has {path.stat().st_size} bytes, but its index says {wanted}.")
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
