"""FedBN: FedAvg with private BatchNorm layers: each client keeps their weights and statistics.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

BatchNorm layers are found by their type, not by their name. With a model that has none, this is FedAvg.

Differs from the paper: the mean is weighted by numbers of rows (`weights=uniform` gives the paper's).
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedbn() -> Method:
    """FedAvg with private BatchNorm layers."""
    return KeepLocal(host=FedAvg(), private="batch-norm")
