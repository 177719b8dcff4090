"""Open functions and operations of a reading, to which anybody may add versions for single forms.

An operation stores its result on the reading, for other extensions. Because it is a function and
not a method, anybody can add an operation, or a faster version of one for some form:

    @Operation
    def largest(product: SampleProduct) -> Tensor: ...

    @largest.register
    def largest_affine(product: AffineProduct) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, update_wrapper
from typing import Any, Generic, TypeVar, get_args, get_type_hints
from weakref import WeakSet

from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.discovery import discover
from backpack_core.errors import PluginError
from backpack_core.plugins.registry import registry
from backpack_core.preferences import Claim, Provenance, choose, qualified_name
from backpack_products.computing import only_computes

R = TypeVar("R")
_all: WeakSet[OpenFunction[Any]] = WeakSet()


class OpenFunction(Generic[R]):
    """A function of a reading, to which anybody may add versions for single forms.

    A form is a subclass of ``Reading``, such as a form of product. If two packages add a version
    for the same form, calling it with that form raises an error, unless
    :func:`backpack_core.prefer` chooses.
    """

    def __init__(self, definition: Callable[..., R]) -> None:
        """Take the definition, which is for every form."""
        self.definition = definition
        self._versions: dict[type, dict[str, Callable[..., R]]] = {}  # by form and package
        self._chosen: dict[type, Callable[..., R]] = {}  # a cache: the version to call, by form
        self.__name__ = ""
        update_wrapper(self, definition)
        _all.add(self)

    def register(self, version: Callable[..., R]) -> Callable[..., R]:
        """Add a version for the form, or forms, in the annotation of its first argument.

        Raises:
            PluginError: The annotation is not a form.
        """
        form = next(iter(get_type_hints(version).values()), None)
        for each in get_args(form) or (form,):
            if not (isinstance(each, type) and issubclass(each, Reading)):
                raise PluginError(
                    f"{self.__name__}.register takes a function whose first argument is annotated "
                    f"with a form: (product: AffineProduct). Got {version!r}, with {each!r}."
                )
            self._versions.setdefault(each, {})[version.__module__.partition(".")[0]] = version
        # A new cache: a thread that looks a version up meanwhile writes to the old one.
        self._chosen = {}
        registry.forget()  # passes that repeat what another version computed
        return version

    def has_version(self, form: type[Reading]) -> bool:
        """Whether there is a version for a form, in addition to the definition."""
        return not self._versions.keys().isdisjoint(form.__mro__)

    def _version_for(self, form: type) -> Callable[..., R]:
        """The function to call for a form.

        Raises:
            PluginConflictError: Several packages have one, and none is preferred.
        """
        chosen = self._chosen
        base = next(filter(self._versions.__contains__, form.__mro__), None)
        versions = {"": self.definition} if base is None else self._versions[base]
        function = preferred_version(versions, f"{self.__name__}/{qualified_name(base or form)}")
        if len(versions) == 1:  # otherwise a preference decides, which may change
            chosen[form] = function
        return function

    def __call__(self, product: Reading, *arguments: Any) -> R:
        """The value for a reading."""
        form = type(product)
        return (self._chosen.get(form) or self._version_for(form))(product, *arguments)

    def __repr__(self) -> str:
        """The name."""
        return f"<operation {self.__name__}>"

    def __reduce__(self) -> str:
        """Copies and pickles refer to the one object of that name."""
        return self.__name__


def versions_that_may_do_more() -> list[Callable[..., Any]]:
    """Versions whose package does not say that it only computes, of functions and forms that do."""
    return [
        version
        for function in (*_all,)
        if only_computes(function.definition)
        for form, versions in function._versions.items()
        if only_computes(form)
        for version in versions.values()
        if not only_computes(version)
    ]


class Operation(OpenFunction[R]):
    """An open function whose result is cached on the reading.

    Further arguments must be hashable settings. A function of further tensors is an
    :class:`OpenFunction`.
    """

    def __call__(self, product: Reading, *settings: Any) -> R:
        """The result for a reading, computed once; callers must not change it."""
        key, form = (self, *settings), type(product)
        results = product.results
        result: R | None = results.get(key)
        if result is None:
            version = self._chosen.get(form) or self._version_for(form)
            result = results[key] = version(product, *settings)
            if isinstance(result, Tensor):
                product.made += ((result, result._version),)
        return result


def preferred_version(versions: Mapping[str, R], key: str) -> R:
    """The only version, or that of the preferred package, of several by package.

    Raises:
        PluginConflictError: There are several, and none is preferred.
    """
    if len(versions) == 1:
        return next(iter(versions.values()))
    return choose([Claim(each, _of(who)) for who, each in versions.items()], key, "version").value


@cache
def _of(package: str) -> Provenance:
    """The provenance of plugins in a package; if there are none, the package itself."""
    named = (p.provenance for p in discover() if p.package == package)
    return next(named, Provenance("", package))
