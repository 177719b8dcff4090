"""The conformance kit, applied to every installed layer rule and loss rule."""

from __future__ import annotations

import pytest

from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import CORE, registry
from backpack_core.testing import parametrize_checks
from tests.conformance import (
    cases_activation,
    cases_affine,
    cases_losses,
    cases_modules,
    cases_normalization,
    cases_pooling,
    cases_sequence,
    cases_shape,
)

LAYERS = [
    *cases_affine.CASES,
    *cases_activation.CASES,
    *cases_pooling.CASES,
    *cases_shape.CASES,
    *cases_normalization.CASES,
    *cases_sequence.CASES,
    *cases_modules.CASES,
]
LOSSES = cases_losses.CASES

pytestmark = [
    # KLDivLoss says at every mean that "batchmean" is the one to use.
    pytest.mark.filterwarnings("ignore:reduction.*batchmean:UserWarning"),
    # RMSNorm under autocast.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]


@pytest.mark.grid(36)
@parametrize_checks(LAYERS)
def test_layer(check):
    check()


@pytest.mark.grid(4)
@parametrize_checks(LOSSES)
def test_loss(check):
    check()


def test_every_installed_rule_is_checked():
    ensure_loaded()
    checked = {type(case.module()) for case in LAYERS}
    checked |= {type(case.loss_factory(reduction="sum")) for case in LOSSES}
    installed = {
        kind
        for kind, claims in registry.rules.items()
        if not isinstance(kind, str) and claims[0].provenance != CORE
    }
    assert installed - checked == set(), "add a case to a table of tests/conformance"
