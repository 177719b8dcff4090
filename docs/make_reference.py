"""Writes ``docs/extensions.md`` from the docstrings of the installed extensions.

Run ``python docs/make_reference.py`` after changing one; a test compares the page with the code.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry

PAGE = Path(__file__).parent / "extensions.md"

HEAD = """# Quantities

Every extension of this repository's plugins, from its docstring (`docs/make_reference.py` writes
this page). Axes, scaling and the life of a result are explained once in
[conventions](conventions.md).

    from backpack_core.extensions import {example}
"""


def page() -> str:
    """The whole page."""
    ensure_loaded()
    ours = {}
    for name, claims in sorted(registry.extensions.items()):
        for claim in claims:
            if claim.provenance.distribution.startswith("backpack-plugin-"):
                ours.setdefault(claim.provenance.distribution, {})[name] = claim.value
    parts = [HEAD.format(example="BatchGrad, DiagGGNExact")]
    for distribution in ("backpack-plugin-firstorder", "backpack-plugin-secondorder"):
        parts.append(f"## {distribution}\n")
        parts += [_entry(name, kind) for name, kind in ours[distribution].items()]
    return "\n".join(parts)


def _entry(name: str, kind: type) -> str:
    signature = inspect.signature(kind.__init__)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in list(signature.parameters.values())[1:]
    ]
    arguments = ", ".join(map(str, parameters))
    text = inspect.getdoc(kind) or ""
    if not text:
        raise SystemExit(f"{name} has no docstring.")
    text = text.replace("``", "`").replace(":class:", "").replace(":func:", "")
    return f"### {name}\n`{name}({arguments})`\n\n{text}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
