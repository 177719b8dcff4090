"""Training loops of others: who calls ``backward()``, and who has hooks around it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend, unextend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import oracle


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 3), torch.randint(3, (5,))


def individual(model: nn.Module, x: Tensor, y: Tensor, scale: float) -> list[Tensor]:
    """By a loop over samples, of a copy that nobody knows."""
    plain = unextend(copy.deepcopy(model))
    parameters = [*plain.parameters()]
    found = [
        oracle.gradients(
            scale * nn.functional.cross_entropy(plain(x[n : n + 1]), y[n : n + 1]), parameters
        )
        for n in range(len(x))
    ]
    return [torch.stack(gradients) for gradients in zip(*found, strict=True)]


def assert_individual(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch, gradients)


def test_a_closure_of_lbfgs() -> None:
    """It calls the closure several times for one step."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    x, y = data()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls: list[None] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        expected = individual(model, x, y, 1 / len(x))
        loss: Tensor = lossfunc(model(x), y)
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        assert_individual(model, expected)
        calls.append(None)
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert len(calls) > 1


def test_a_scaled_loss() -> None:
    """Individual gradients are scaled as the gradient is; the scaler takes it from that alone."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    x, y = data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = individual(model, x, y, 1024 / len(x))
    with backpack(BatchGrad()):
        scaler.scale(lossfunc(model(x), y)).backward()
    assert_individual(model, expected)
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad_batch.sum(0) / 1024, parameter.grad)
    scaler.step(optimizer)
    scaler.update()


def test_an_optimizer_inside_the_backward_pass() -> None:
    """It steps as soon as a gradient is there, so that none has to be kept."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    x, y = data()
    expected = individual(model, x, y, 1 / len(x))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    for parameter, old, gradients in zip(model.parameters(), before, expected, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.grad_batch, gradients)
        torch.testing.assert_close(parameter.detach(), old - 0.1 * gradients.sum(0))


@pytest.mark.host("it moves the model by itself")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    x, y = data()
    for _ in range(2):
        with accelerator.accumulate(prepared):
            # The loss is divided by the number of steps that are accumulated.
            expected = individual(model, x, y, 1 / (2 * len(x)))
            loss = lossfunc(prepared(x), y)
            with backpack(BatchGrad(), DiagGGNExact()):
                accelerator.backward(loss)
            assert_individual(model, expected)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings(
    "ignore:::transformers", "ignore:::torch.utils.data", "ignore:::accelerate"
)
def test_trainer(tmp_path: Path) -> None:
    """``Trainer`` has the model compute its loss, and steps by accelerate."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Trainer asks for accelerate")
    from benchmarks.models.text import GROUPED, PLAIN

    config = transformers.LlamaConfig(**PLAIN, **GROUPED)
    model = extend(transformers.LlamaForCausalLM(config))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 11, (6, 5))]
    seen: list[int] = []

    class Extended(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with backpack(BatchGrad()):
                loss: Tensor = super().training_step(*args, **kwargs)
            for parameter in model.parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    parameter.grad_batch.sum(0), parameter.grad, rtol=1e-4, atol=1e-6
                )
                seen.append(len(parameter.grad_batch))
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        max_steps=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    Extended(model=model, args=arguments, train_dataset=rows).train()
    assert set(seen) == {3}
    assert len(seen) == 2 * len([*model.parameters()])


def lightning_module(lightning: Any, is_manual: bool, seen: list[int]) -> Any:
    """A module that compares individual gradients in each backward pass, and notes how many."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
            self.automatic_optimization = not is_manual

        def training_step(self, batch: Any, number: int) -> Tensor:
            self.expected = individual(self.model, *batch, 1 / len(batch[0]))
            loss: Tensor = self.lossfunc(self.model(batch[0]), batch[1])
            if is_manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with backpack(BatchGrad(), DiagGGNExact()):
                super().backward(loss, *args, **kwargs)
            assert_individual(self.model, self.expected)
            seen.append(len(self.expected))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:::pytorch_lightning", "ignore:::torch")
@pytest.mark.parametrize("is_manual", [False, True])
def test_lightning(tmp_path: Path, is_manual: bool) -> None:
    """Whoever steps, the module's ``backward`` runs the pass."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    seen: list[int] = []
    module = lightning_module(lightning, is_manual, seen)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    rows = torch.utils.data.TensorDataset(*data())
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    assert len(seen) == 3
