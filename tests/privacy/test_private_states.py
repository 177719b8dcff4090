"""Checkpoints of private training: they go on as if nothing had been, or raise."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.errors import UsageError
from backpack_privacy import AdaptiveClipping, Clipping, make_private
from tests.privacy.problems import difference, loader_of, make, privately, run


def test_a_checkpoint_goes_on_as_if_nothing_had_been() -> None:
    def fresh() -> Any:
        clipping = AdaptiveClipping(0.5, count_noise=5.0)
        return privately(clipping=clipping, noise_multiplier=1.0, checks=2)

    whole, model, lossfunc = fresh()
    run(whole, model, lossfunc, 6)
    half, other, lossfunc = fresh()
    run(half, other, lossfunc, 3)
    file = io.BytesIO()
    torch.save([half.state_dict(), other.state_dict()], file)
    file.seek(0)
    state, weights = torch.load(file)
    again, third, lossfunc = fresh()
    again.load_state_dict(state)
    third.load_state_dict(weights)
    run(again, third, lossfunc, 6)
    assert difference(third, model) == 0
    assert again.epsilon(1e-3) == whole.epsilon(1e-3)
    assert again.clipping.bounds == whole.clipping.bounds
    with pytest.raises(UsageError, match="lacks"):
        again.load_state_dict({})
    with pytest.raises(UsageError, match="Got NoneType"):
        again.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="same clipping"):
        again.load_state_dict({**state, "bounds": {"x": 1.0}})


def test_states_that_would_forget_what_was_spent() -> None:
    """Later ones, those of other settings, and those that leave too little of a target."""
    private, model, lossfunc = privately(noise_multiplier=1.0)
    state = private.state_dict()
    run(private, model, lossfunc, 3)
    with pytest.raises(UsageError, match="3 steps were taken here"):
        private.load_state_dict(state)
    others: tuple[dict[str, Any], ...] = (
        {"max_norm": 0.6},
        {"clipping": AdaptiveClipping(0.5)},
        {"clipping": Clipping(0.5, weights="automatic")},
        {"users": [*range(6)] * 2},
    )
    for options in others:
        other = privately(noise_multiplier=1.0, **options)[0]
        with pytest.raises(UsageError, match="The state is of a training with"):
            other.load_state_dict(private.state_dict())


@pytest.mark.parametrize("groups", ["flat", "per_layer"])
def test_layers_are_unfrozen_later(groups: Any) -> None:
    """Bounds that do not change follow from the settings; what was spent stays spent."""
    model, data = make("perceptron")
    model[0].requires_grad_(False)
    lossfunc, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model[2:].parameters(), lr=0.1)

    def again() -> Any:
        options: dict[str, Any] = {"clipping": Clipping(1.0, groups), "noise_multiplier": 1.0}
        return make_private(model, lossfunc, optimizer, loader_of(data), seed=1, **options)

    private = again()
    run(private, model, lossfunc, 2)
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"To train others from now on, call private.close\(\)"):
        run(private, model, lossfunc, 3)
    private.close()
    optimizer.add_param_group({"params": model[0].parameters()})
    before, more = model[0].weight.clone(), again()
    more.load_state_dict(private.state_dict())
    run(more, model, lossfunc, 4)
    assert more.steps == 4
    assert more.epsilon(1e-3) > private.epsilon(1e-3)
    assert more.clipping.sensitivity == pytest.approx(1.0)
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_states_and_targets(sampling: str) -> None:
    """The same target can be gone on with, and another one may be exceeded."""

    def fresh(epochs: int) -> Any:
        target: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": 1e-3, "epochs": epochs}
        options: dict[str, Any] = {"sampling": sampling, "accountant": "rdp", "checks": 0}
        return privately(noise_multiplier=None, **options, **target)

    first, model, lossfunc = fresh(2)
    run(first, model, lossfunc, 3)
    again, other, lossfunc = fresh(2)
    again.load_state_dict(first.state_dict())
    run(again, other, lossfunc, 6)
    assert again.epsilon() <= 2.0
    longer = fresh(4)[0]
    with pytest.raises(UsageError, match="but target_epsilon is 2"):
        longer.load_state_dict(first.state_dict())
    assert longer.steps == 0
