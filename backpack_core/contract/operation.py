"""Open operations: functions of a reading that may have other versions for its form.

An operation keeps its result on the reading, for other extensions. It is not a method, so that
anybody can add a new one, or a faster version of a known one for some form:

    @Operation
    def largest(product: SampleProduct) -> Tensor: ...

    @largest.register
    def largest_affine(product: AffineProduct) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from torch import Tensor

from backpack_core.contract.reading import Reading
from backpack_core.discovery import preferred_version, qualified_name
from backpack_core.errors import PluginError

R = TypeVar("R")


class OpenFunction(Generic[R]):
    """A function of a reading, to which anybody may add versions for single forms.

    A form is a class of readings, as a form of products is. Two versions for one form, from two
    packages, are a conflict. It raises when such a reading is met, unless
    :func:`backpack_core.prefer` chooses.
    """

    def __init__(self, definition: Callable[..., R]) -> None:
        """Take the definition, which works for every form."""
        self.definition = definition
        self._versions: dict[type, dict[str, Callable[..., R]]] = {}  # by form and package
        self._chosen: dict[type, Callable[..., R]] = {}  # what is called for a form
        self.__name__ = ""
        update_wrapper(self, definition)

    def register(self, version: Callable[..., R]) -> Callable[..., R]:
        """Use a function for the form, or forms, that its first argument is annotated with.

        Raises:
            PluginError: It is annotated with none.
        """
        form = next(iter(get_type_hints(version).values()), None)
        for each in get_args(form) or (form,):
            if not (isinstance(each, type) and issubclass(each, Reading)):
                raise PluginError(
                    f"{self.__name__}.register takes a function whose first argument is annotated "
                    f"with a form, as (product: AffineProduct). Got {version!r}, with {each!r}."
                )
            self._versions.setdefault(each, {})[version.__module__.partition(".")[0]] = version
        self._chosen = {}  # what another thread is looking up meanwhile goes into the old one
        return version

    def has_version(self, form: type[Reading]) -> bool:
        """Whether a form has a version besides the definition."""
        return not self._versions.keys().isdisjoint(form.__mro__)

    def _version_for(self, form: type) -> Callable[..., R]:
        """The function to call for a form.

        Raises:
            PluginConflictError: Several packages have one, and none is preferred.
        """
        chosen = self._chosen
        its = next(filter(self._versions.__contains__, form.__mro__), None)
        versions = {"": self.definition} if its is None else self._versions[its]
        function = preferred_version(versions, f"{self.__name__}/{qualified_name(its or form)}")
        if len(versions) == 1:  # else a preference decides, which may change
            chosen[form] = function
        return function

    def __call__(self, product: Reading, *arguments: Any) -> R:
        """The result for a reading."""
        form = type(product)
        return (self._chosen.get(form) or self._version_for(form))(product, *arguments)

    def __repr__(self) -> str:
        """The name."""
        return f"<operation {self.__name__}>"

    def __reduce__(self) -> str:
        """Copies and pickles refer to the one object of that name."""
        return self.__name__


class Operation(OpenFunction[R]):
    """An open function whose result is kept on the reading.

    Further arguments have to be hashable values (a setting). A function of further tensors is an
    :class:`OpenFunction`.
    """

    def __call__(self, product: Reading, *settings: Any) -> R:
        """The result for a reading: computed once, and not to be changed."""
        key, form = (self, *settings), type(product)
        results = product.results
        result: R | None = results.get(key)
        if result is None:
            version = self._chosen.get(form) or self._version_for(form)
            result = results[key] = version(product, *settings)
            if isinstance(result, Tensor):
                product.made += ((result, result._version),)
        return result
