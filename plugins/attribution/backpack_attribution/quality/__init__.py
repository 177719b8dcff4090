"""How good scores are, measured offline: a matrix in, a number out.

Measures (:mod:`~backpack_attribution.quality.measures`) take scores of any program. Tasks have a
model that can be retrained without some of its samples, and queries:
:func:`digits`, :func:`characters`, :func:`facts`.
"""

from __future__ import annotations

from backpack_attribution.quality.measures import Measured as Measured
from backpack_attribution.quality.measures import brittleness as brittleness
from backpack_attribution.quality.measures import lds as lds
from backpack_attribution.quality.measures import leave_one_out as leave_one_out
from backpack_attribution.quality.measures import mean_reciprocal_rank as mean_reciprocal_rank
from backpack_attribution.quality.measures import mislabelled_auc as mislabelled_auc
from backpack_attribution.quality.measures import recall_at as recall_at
from backpack_attribution.quality.measures import spearman as spearman
from backpack_attribution.quality.tasks import Task as Task
from backpack_attribution.quality.tasks import characters as characters
from backpack_attribution.quality.tasks import digits as digits
from backpack_attribution.quality.tasks import facts as facts
from backpack_attribution.quality.truth import Retrained as Retrained
from backpack_attribution.quality.truth import halves as halves
from backpack_attribution.quality.truth import retrained as retrained
