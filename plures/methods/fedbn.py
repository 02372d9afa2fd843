"""FedBN: FedAvg in which every client keeps its BatchNorm layers, weights and statistics, to itself.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

The layers are found by their type, not by their name. A model without BatchNorm makes it FedAvg.

Differs from the paper: the mean is weighted by rows (`weights=uniform` gives the paper's).
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedbn() -> Method:
    return KeepLocal(host=FedAvg(), private="batch-norm")
