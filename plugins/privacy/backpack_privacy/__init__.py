"""Differentially private training with individual gradients."""

from backpack_privacy.accounting import Accountant, Spent
from backpack_privacy.clipping import AdaptiveClipping, Clipping
from backpack_privacy.making import make_private
from backpack_privacy.private import Private
from backpack_privacy.refusals import replace_batch_norm
from backpack_privacy.release import Record
from backpack_privacy.sampling import PrivateLoader
from backpack_products.computing import declare_only_computes

__all__ = [
    "Accountant",
    "AdaptiveClipping",
    "Clipping",
    "Private",
    "PrivateLoader",
    "Record",
    "Spent",
    "make_private",
    "replace_batch_norm",
]

declare_only_computes(__name__)
