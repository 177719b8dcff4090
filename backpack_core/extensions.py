"""Every installed extension, by class name: ``from backpack_core.extensions import BatchGrad``."""

from __future__ import annotations

from typing import Any

from backpack_core.discovery import choose
from backpack_core.errors import nearest
from backpack_core.plugins.loading import ensure_loaded, known_plugins, load_provider, missing
from backpack_core.plugins.registry import registry

# The distributions of this project's extensions, for the message when one is not installed.
_DISTRIBUTIONS = {
    "backpack-plugin-firstorder": (
        "BatchGrad BatchL2Grad SumGradSquared Variance BatchDotGrad ClippedSumGrad GradInner "
        "ProjectedGrad"
    ),
    "backpack-plugin-secondorder": (
        "DiagGGNExact DiagGGNMC BatchDiagGGNExact BatchDiagGGNMC SqrtGGNExact SqrtGGNMC "
        "DiagHessian BatchDiagHessian KFAC KFLR KFRA EKFAC GGNMP HMP PCHMP GGNGram"
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ensure_loaded()
    if name not in registry.extensions:
        load_provider(name)  # while plugins load, one may ask for the class of a later one
    claims = registry.extensions.get(name)
    if claims:
        return choose(claims, name, "extension").value
    raise missing(_why_missing(name), name)


def _why_missing(name: str) -> str:
    for plugin in known_plugins():
        if plugin.attribute == name and plugin.state == "blocked":
            return f"The extension {name} of {plugin.provenance} is not available."
    for distribution, names in _DISTRIBUTIONS.items():
        if name in names.split():
            return (
                f"The extension {name} is not available: it is provided by {distribution}. Run "
                f"`pip install {distribution}`."
            )
    near = nearest(name, registry.extensions) or "."
    return (
        f"No installed plugin provides an extension named {name!r}{near} Installed: "
        f"{', '.join(sorted(registry.extensions)) or 'none'}. Install the plugin that has it; "
        "`backpack plugins` lists what is there."
    )


def __dir__() -> list[str]:
    ensure_loaded()
    return sorted(registry.extensions)
