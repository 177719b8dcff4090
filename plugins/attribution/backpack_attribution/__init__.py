"""Which training samples shaped what a model says."""

from __future__ import annotations

from backpack_attribution.curvature import Influence as Influence
from backpack_attribution.exchange import read_bergson as read_bergson
from backpack_attribution.exchange import read_dattri as read_dattri
from backpack_attribution.exchange import write_bergson as write_bergson
from backpack_attribution.exchange import write_dattri as write_dattri
from backpack_attribution.faiss_index import FaissIndex as FaissIndex
from backpack_attribution.filling import fill as fill
from backpack_attribution.filling import preconditioned as preconditioned
from backpack_attribution.identities import content_hash as content_hash
from backpack_attribution.influence import influence as influence
from backpack_attribution.influence import self_influence as self_influence
from backpack_attribution.merging import merge_stores as merge_stores
from backpack_attribution.methods import GradCosine as GradCosine
from backpack_attribution.methods import GradDot as GradDot
from backpack_attribution.methods import Method as Method
from backpack_attribution.methods import TracIn as TracIn
from backpack_attribution.projected import TRAK as TRAK
from backpack_attribution.projected import LoGra as LoGra
from backpack_attribution.projected import project as project
from backpack_attribution.scores import Found as Found
from backpack_attribution.scores import Scores as Scores
from backpack_attribution.store import GradientStore as GradientStore
