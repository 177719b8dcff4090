"""Stores of several machines as one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from backpack_attribution.disk import UNFINISHED
from backpack_attribution.identities import checked
from backpack_attribution.manifest import Manifest
from backpack_attribution.store import GradientStore
from backpack_core.errors import UsageError
from backpack_products.fingerprint import agreed

_OTHER: Final = "Stores can be merged if their settings, parts and shapes are the same. Got {}."


def merge_stores(folders: Iterable[str | Path], into: str | Path) -> GradientStore:
    """One store of the rows of several, such as those that ranks wrote on separate machines.

    Shards are copied unchanged. Ranks that share a folder need no merging. Stores that never had a
    row, such as that of a rank without samples, are left out.

    Args:
        folders: Stores with the same settings, parts and shapes.
        into: A folder that does not exist. It appears when it is complete.

    Raises:
        UsageError: Settings or weights of the model differ, a sample is in two of them, or the
            folder exists.
    """
    if isinstance(folders, (str, Path)):
        raise UsageError(f"merge_stores takes a list of folders. Got {str(folders)!r}.")
    every, target = [GradientStore(folder) for folder in folders], Path(into)
    sources = [source for source in every if source.shapes] or every
    if len({(s.dtype, s.rank, json.dumps(s.about, sort_keys=True)) for s in every}) > 1:
        raise UsageError(_OTHER.format([str(s.folder) for s in every]))
    found = [Manifest.read(source.folder) for source in sources]
    manifests = [manifest for manifest in found if manifest is not None]
    agreed({str(s.folder): m.plugins for s, m in zip(sources, manifests, strict=True)})
    settings = [replace(manifest, plugins={}, weights="") for manifest in manifests]
    if not sources or any(each != settings[0] for each in settings):
        raise UsageError(_OTHER.format([str(s.folder) for s in sources] or "none"))
    if len({manifest.weights for manifest in manifests} - {""}) > 1:
        raise UsageError(
            "The rows of these stores were computed at different weights of the model, and are not "
            f"compared. Got {[str(s.folder) for s in sources]}."
        )
    checked([name for source in sources for name in source.identities], sum(map(len, sources)))
    if target.exists():
        raise UsageError(f"{target} exists: give a folder that does not.")
    beside = target.with_name(f".{target.name}{UNFINISHED}")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(sources[0].folder, beside, ignore=shutil.ignore_patterns(f"*{UNFINISHED}"))
    for number, source in enumerate(sources[1:], 1):
        for path in sorted(source.folder.glob("*.safetensors")):
            shutil.copyfile(path, beside / f"{path.stem}-{number}.safetensors")
    os.replace(beside, target)
    return GradientStore(target)
