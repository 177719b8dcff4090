"""Private training in the ``Trainer`` of transformers (an extra: ``pip install transformers``)."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from backpack_core.errors import UsageError
from backpack_privacy.private import Private


class PrivateCallback(TrainerCallback):
    """Makes the steps of a ``Trainer`` private.

    Example:
        >>> trainer = Trainer(
        ...     model, args, train_dataset=data, optimizers=(optimizer, None),
        ...     compute_loss_func=lambda outputs, labels, **_: lossfunc(outputs.logits, labels),
        ... )
        >>> PrivateCallback(private).attach(trainer)
        >>> trainer.train()

    The loss must be the module that was passed to ``make_private``: the loss that models compute
    themselves is a mean over an unknown number of tokens.
    """

    def __init__(self, private: Private) -> None:
        """Store what makes steps private."""
        self._private, self._is_attached = private, False

    def attach(self, trainer: Trainer) -> None:
        """Make a trainer call this, and take the batches that are drawn.

        Args:
            trainer: The trainer, before ``train()``.
        """
        step = trainer.training_step  # the forward and the backward pass of a batch

        def private_step(*args: Any, **kwargs: Any) -> Any:
            with self._private:
                return step(*args, **kwargs)

        # Batches come directly from the loader: nothing may draw ahead, or shard batches again.
        vars(trainer)["get_train_dataloader"] = lambda: self._private.loader
        vars(trainer)["training_step"], self._is_attached = private_step, True
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the trainer uses what was made private.

        Raises:
            UsageError: The trainer has other batches, another optimizer, or adds up gradients.
        """
        optimizer = kwargs.get("optimizer")
        if not self._is_attached or kwargs.get("train_dataloader") is not self._private.loader:
            raise UsageError(
                "The Trainer draws its own batches, or takes its own steps. Call "
                "PrivateCallback(private).attach(trainer) instead of callbacks=[...]."
            )
        if getattr(optimizer, "optimizer", optimizer) is not self._private.optimizer:
            raise UsageError(
                "The Trainer made its own optimizer. Give it the one of make_private(...), "
                "Trainer(..., optimizers=(private.optimizer, None))."
            )
        if args.gradient_accumulation_steps != 1:
            raise UsageError(
                "gradient_accumulation_steps adds up batches, but the accounting counts a step for "
                "each. Set it to 1, and make the loader's batch_size larger."
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the whole batch has gone backward.

        Raises:
            UsageError: The batch came in parts.
        """
        if not self._private.is_complete:
            raise UsageError("The Trainer steps after each part of a batch. Leave out max_rows=.")
