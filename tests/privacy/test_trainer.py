"""The loops of others: accelerate, and the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.errors import UsageError
from backpack_privacy import make_private
from tests.privacy.problems import difference, loader_of, privately, run

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")


def test_accelerate() -> None:
    first, model, lossfunc = privately(noise_multiplier=0.5)
    run(first, model, lossfunc, 3)
    second, other, lossfunc = privately(noise_multiplier=0.5)
    accelerator = accelerate.Accelerator(cpu=True)
    for x, y in second.loader:
        second.step(lossfunc(other(x), y), backward=accelerator.backward)
    assert difference(model, other) == 0


def test_accelerators_that_divide_the_loss() -> None:
    private, model, lossfunc = privately()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs, targets = next(iter(private.loader))
    with pytest.raises(UsageError, match=r"multiplied the loss by 0\.5"):
        private.step(lossfunc(model(inputs), targets), backward=accelerator.backward)
    assert private.steps == 0


class Sentences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(9, (5,), generator=generator), "labels": index % 2}


def tiny() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2, pad_token_id=0, num_labels=2
    )
    model = transformers.GPT2ForSequenceClassification(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lossfunc = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(Sentences(), 4, collate_fn=transformers.default_data_collator)
    private = make_private(
        model, lossfunc, optimizer, loader, noise_multiplier=0.5, max_norm=1.0, seed=2
    )
    return private, model, lossfunc


def trainer_of(private: Any, folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        lr_scheduler_type="constant",
        disable_tqdm=True,
        **options.pop("arguments", {}),
    )
    options.setdefault("optimizers", (private.optimizer, None))
    return transformers.Trainer(
        private.model,
        arguments,
        train_dataset=Sentences(),
        compute_loss_func=lambda outputs, labels, **_: private.lossfunc(outputs.logits, labels),
        **options,
    )


@pytest.mark.host("it moves the model by itself")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    from backpack_privacy.trainer import PrivateCallback

    first, model, lossfunc = tiny()
    for _ in range(2):
        for batch in first.loader:
            first.step(lossfunc(model(input_ids=batch["input_ids"]).logits, batch["labels"]))
    second, other, _ = tiny()
    trainer = trainer_of(second, tmp_path)
    PrivateCallback(second).attach(trainer)
    trainer.train()
    assert second.steps == 6
    assert difference(model, other) < 1e-12


@pytest.mark.host("it moves the model by itself")
def test_a_trainer_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    from backpack_privacy.trainer import PrivateCallback

    private, _, lossfunc = tiny()
    trainer, losses = trainer_of(private, tmp_path), list[float]()
    PrivateCallback(private).attach(trainer)

    def fails(outputs: Any, labels: Any, **_: Any) -> Any:
        if len(losses) == 1:
            raise KeyError("in the loss")
        losses.append(0.0)
        return lossfunc(outputs.logits, labels)

    trainer.compute_loss_func = fails
    with pytest.raises(KeyError, match="in the loss"):
        trainer.train()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad is not None
    losses.append(0.0)
    trainer.train()
    assert private.steps == 7


def test_trainers_that_are_not_private(tmp_path: Path) -> None:
    from backpack_privacy.trainer import PrivateCallback

    private, _, _ = tiny()
    with pytest.raises(UsageError, match="draws its own batches"):
        trainer_of(private, tmp_path, callbacks=[PrivateCallback(private)]).train()
    trainer = trainer_of(private, tmp_path, callbacks=[PrivateCallback(private)])
    trainer.get_train_dataloader = lambda: private.loader
    with pytest.raises(UsageError, match="takes its own steps"):
        trainer.train()
    for options, message in (
        ({"optimizers": (None, None)}, "its own optimizer"),
        ({"arguments": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps"),
    ):
        trainer = trainer_of(private, tmp_path, **options)
        PrivateCallback(private).attach(trainer)
        with pytest.raises(UsageError, match=message):
            trainer.train()


def test_adapters_of_peft() -> None:
    """Low-rank adapters alone are trained; one that is switched off is found."""
    peft = pytest.importorskip("peft")
    _, model, _ = tiny()
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    lossfunc = nn.CrossEntropyLoss()
    trained = [p for p in model.parameters() if p.requires_grad]
    loader = loader_of(Sentences(), 4, collate_fn=transformers.default_data_collator)
    private = make_private(
        model,
        lossfunc,
        torch.optim.SGD(trained, lr=0.1),
        loader,
        noise_multiplier=0.5,
        max_norm=1.0,
    )
    for _ in range(3):
        for batch in private.loader:
            logits = model(input_ids=batch["input_ids"]).logits
            private.step(lossfunc(logits, batch["labels"]))
    assert private.steps == 9
    assert all(norms.max() > 0 for norms in private.records[-1].norms.values() if len(norms))
