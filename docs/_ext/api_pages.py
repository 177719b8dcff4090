"""Writes the pages of the API reference, ``docs/api/*.md``, from the public names of the packages.

A name that becomes public has an entry by itself; one without a docstring stops the build.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import backpack_core.api
import backpack_products.api
from backpack_core import plugins
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# What a reader looks for first, in front of the alphabet.
FIRST = ("backpack", "extend", "disable", "quantities")

# What modules that have nothing of their own offer.
APIS = {
    backpack_core: backpack_core.api,
    backpack_products: backpack_products.api,
    plugins: plugins,
}


# Values that cannot have a docstring, and what they are.
DATA = {
    "backpack_core.plugins.API_VERSION": "The version of the plugin interface, an integer.",
    "backpack_core.contract.extension.FailMode": "The type of the option ``fail_mode``: "
    '``"autodiff"``, ``"error"``, ``"warning"`` or ``"silent"``. '
    ":class:`backpack_core.Extension` says what each does.",
    "backpack_core.testing.imports.HEAVY": "The packages that no module of a plugin may import "
    "when it is loaded, a tuple of names.",
    "backpack_firstorder.tokens.Per": "The type of the option ``per``: "
    '``"sample"``, or ``"token"`` for the share of each position.',
}


class Page(NamedTuple):
    """One page: what it is called, what it says first, and what it lists.

    It lists the names of modules, and single names of others. Of the modules, those count that
    there are; a page without any is left out.
    """

    file: str
    title: str
    text: str
    modules: tuple[str, ...]
    names: tuple[str, ...] = ()


PAGES = (
    Page(
        "core",
        "backpack_core",
        "What a script and a plugin import. `from backpack_core import backpack, extend`.",
        ("backpack_core",),
    ),
    Page(
        "products",
        "backpack_products",
        "Rules of layers with parameters, the products that they give, and what reads these.",
        ("backpack_products",),
        (
            "backpack_products.tuning.memory_budget",
            "backpack_products.tuning.set_memory_budget",
        ),
    ),
    Page(
        "extensions",
        "backpack_core.extensions",
        "The extensions that are installed, whatever plugin brings them. "
        "[Quantities](../extensions.md) has them with fields, shapes and formulas on one page.",
        ("backpack_core.extensions",),
    ),
    Page(
        "values",
        "Results and propagators",
        "What `param.kfac`, `param.ekfac` and `param.ggn_gram` are, and what travels backwards.",
        tuple(
            f"backpack_secondorder.{name}"
            for name in (
                *("matrix", "kronecker", "eigenbasis", "gram", "propagators", "linear"),
                *("blocks", "over_data", "conjugate_gradients", "curvlinops", "whole", "laplace"),
                *("output_jacobian", "jacobian_products", "outputs"),
            )
        ),
    ),
    Page(
        "gradients",
        "Gradients that agree, or not",
        "What is made of inner products of gradients, of samples and of several losses.",
        ("backpack_firstorder.agreement", "backpack_firstorder.tasks"),
    ),
    Page(
        "data",
        "backpack_data",
        "Quantities of several batches, and of several processes; and which plugins computed them.",
        (
            *("backpack_data", "backpack_data.borrowed"),
            *("backpack_products.fingerprint", "backpack_products.ranks"),
        ),
    ),
    Page(
        "capture",
        "backpack_capture",
        "Training steps that are recorded once. [Captured steps](../captured.md) has them.",
        ("backpack_capture",),
    ),
    Page(
        "privacy",
        "backpack_privacy",
        "Differentially private training. [Private training](../private.md) shows how.",
        ("backpack_privacy",),
    ),
    Page(
        "optimizers",
        "backpack_optimizers",
        "Second-order optimizers. [Optimizers](../optimizers.md) shows how they are used.",
        ("backpack_optimizers",),
    ),
    Page(
        "transformers",
        "backpack_transformers",
        "Rules for models of the transformers package.",
        ("backpack_transformers",),
    ),
    Page(
        "modules",
        "backpack_layers",
        "Small modules that a `Sequential` lacks, losses, and arguments of modules for rules.",
        tuple(
            f"backpack_layers.{name}"
            for name in (
                *("modules", "language", "arguments", "autodiff_loss", "batch_statistics"),
                "perturbation",
            )
        ),
    ),
    Page(
        "attribution",
        "backpack_attribution",
        "Which training samples shaped what a model says, [with examples](../attribution.md).",
        ("backpack_attribution", "backpack_attribution.quality"),
    ),
    Page(
        "operations",
        "backpack_products.operations",
        "Functions of a product, which extensions are written with.",
        ("backpack_products.operations",),
    ),
    Page(
        "firstorder",
        "backpack_firstorder",
        "[Individual gradients as products](../sample-gradients.md), projected and divided; and "
        "clipped sums, for classes that derive from theirs.",
        ("backpack_firstorder",),
        (
            *("backpack_firstorder.tokens.Per", "backpack_firstorder.tokens.as_per"),
            "backpack_firstorder.clipping.ClippedSumGrad",
        ),
    ),
    Page(
        "errors",
        "backpack_core.errors",
        "Every exception and warning. [Troubleshooting](../troubleshooting.md) says what to do.",
        ("backpack_core.errors",),
    ),
    Page(
        "plugins",
        "backpack_core.plugins",
        "Loading and registering plugins, and what options of extensions are made of.",
        ("backpack_core.plugins",),
        (
            "backpack_core.plugins.API_VERSION",
            "backpack_core.testing.imports.HEAVY",
            "backpack_products.computing.declare_only_computes",
            "backpack_products.computing.only_computes",
            "backpack_core.contract.bases.judge",
            "backpack_core.contract.rules.normaliser_of",
            "backpack_core.contract.bases.Candidate",
            "backpack_core.contract.extension.FailMode",
            "backpack_products.extensions.as_subsampling",
            "backpack_core.preferences.preference",
            "backpack_core.autocast.without_autocast",
            "backpack_products.contexts.suspended",
            "backpack_products.loss.loss_factor",
            "backpack_products.loss.loss_gradient",
            "backpack_products.nested.map_tensors",
            "backpack_operations.carrier.Carrier",
            "backpack_operations.carrier.ParameterResult",
            "backpack_operations.operands.products_at",
            "backpack_interplay.compiled.uncompiled",
            "backpack_interplay.shards.shards_in",
        ),
    ),
    Page(
        "compat",
        "backpack (of backpack-compat)",
        "The names of backpack-for-pytorch 1.7, for scripts and packages written for it. "
        "[Coming from BackPACK](../migration.md) says what is the same and what differs. Layers "
        "have derivatives by the same names as there (`backpack.core.derivatives.DERIVATIVES` is "
        "the table); each derives from one of the last classes on this page.",
        (
            *("backpack", "backpack.extensions", "backpack.extensions.backprop_extension"),
            *("backpack.extensions.module_extension", "backpack.core.derivatives.basederivatives"),
            "backpack.core.derivatives.likelihoods",
        ),
    ),
    Page(
        "testing",
        "backpack_core.testing",
        "The conformance kit. [Testing](../authors/testing.md) shows how it is used.",
        ("backpack_core.testing",),
    ),
)


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: the installed extensions, what it says itself, or what it defines."""
    if module.__name__ == "backpack_core.extensions":
        ensure_loaded()
        return sorted(registry.extensions)
    if module in APIS:
        names = [
            name
            for name, value in vars(APIS[module]).items()
            if not (name.startswith("_") or inspect.ismodule(value))
        ]
        first = [name for name in FIRST if name in names]
        return [*first, *sorted(set(names) - set(first))]
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    home = module.__name__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and f"{getattr(value, '__module__', None)}.".startswith(f"{home}.")
        and not inspect.ismodule(value)
    ]


def entries(page: Page) -> Iterator[tuple[str, object]]:
    """The dotted names of a page, and what they stand for."""
    for name in filter(find_spec, page.modules):
        module = import_module(name)
        for entry in public_names(module):
            value = getattr(module, entry)
            if inspect.isclass(value) or callable(value):
                yield f"{name}.{entry}", value
    for name in page.names:
        module_name, _, entry = name.rpartition(".")
        yield name, getattr(import_module(module_name), entry)


def _directive(name: str, value: object) -> str:
    """What shows an entry. An instance of an own class, such as an operation, is a function."""
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n   :show-inheritance:"
    if name in DATA:
        return f".. py:data:: {name}\n\n   {DATA[name]}"
    return f".. autofunction:: {name}"


def text(page: Page) -> str:
    """The page in Markdown."""
    parts = [f"# {page.title}\n\n{page.text}\n"]
    for name, value in entries(page):
        if not (DATA.get(name) or inspect.getdoc(value)):
            raise SystemExit(f"{name} is public and has no docstring.")
        title, shown = name.rpartition(".")[2], _directive(name, value)
        parts.append(f"## {title}\n\n```{{eval-rst}}\n{shown}\n```\n")
    return "\n".join(parts)


def _write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    for page in PAGES:
        path, content = folder / f"{page.file}.md", text(page)
        if not any(entries(page)):
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text("utf-8") != content:
            path.write_text(content, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: _write(app))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
