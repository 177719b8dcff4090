"""Passes over data with batches as captured steps, if ``backpack-capture`` is installed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import Extension
from backpack_core.errors import UsageError
from backpack_data.arguments import require_number
from backpack_data.batches import output_of
from backpack_data.weights import Weights
from backpack_interplay.compiled import uncompiled

MOST: Final = 4  # settings of extensions that differ from batch to batch: a full one, the last one


class CapturedBatches:
    """Runs batches as captured steps."""

    def __init__(
        self, model: Module, lossfunc: Callable[..., Tensor], word: Any, check: Any
    ) -> None:
        """Store the parts of a step.

        Args:
            model: The model.
            lossfunc: The loss.
            word: ``True``, or what is ``compile=`` of ``backpack_capture.capture``.
            check: As of :class:`~backpack_core.backpack`.

        Raises:
            UsageError: The library is not installed, it does not know the word, or hooks of
                parameters would run.
        """
        try:
            from backpack_capture import capture
        except ImportError as error:
            raise UsageError(
                "capture=True needs a library that is not installed. Run "
                "`pip install 'backpack-data[capture]'`, or leave capture= out."
            ) from error
        if any(p._post_accumulate_grad_hooks for p in model.parameters()):
            raise UsageError(
                "A parameter has a hook that runs after its gradient was added (an optimizer may "
                "step there), and captured steps would run it. Remove the hook, or leave capture= "
                "out."
            )

        def step(inputs: Any, targets: Any) -> Tensor:
            with torch.enable_grad(), uncompiled():  # a compiled graph has no modules
                loss = lossfunc(output_of(model, inputs), targets)
            require_number(loss)
            return loss

        modules = [model, *([lossfunc] if isinstance(lossfunc, Module) else [])]
        compile = None if word is True else word
        options: dict[str, Any] = {"check": check, "gradient": "skipped", "compile": compile}
        self._capture = partial(capture, step, *modules, **options)
        capture(step, *modules, **options)  # refuses the word
        self._steps: dict[Hashable, Any] = {}

    def begin(self) -> None:
        """A pass over the data begins, with other extensions."""
        self._steps.clear()

    def __call__(
        self, readers: Sequence[Extension], key: Hashable, of_losses: bool, batch: Any
    ) -> Weights:
        """Run a batch: values are on the parameters.

        Args:
            readers: What is computed.
            key: What tells these from those of other batches.
            of_losses: Whether losses say what they divide by.
            batch: Inputs and targets.
        """
        if key not in self._steps and len(self._steps) == MOST:
            self._steps.clear()
        if key not in self._steps:
            self._steps[key] = self._capture(*readers, observer=partial(Weights, of_losses))
        _, found = self._steps[key](*batch)
        return Weights.of(found)
