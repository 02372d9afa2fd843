"""LG-FedAvg: FedAvg in which every client keeps its body to itself and only the head is shared.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020.

Differs from the paper: training starts from the common start and not from a model trained by FedAvg
before, and no model is chosen by its accuracy on test rows.
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def lgfedavg() -> Method:
    return KeepLocal(host=FedAvg(weights="uniform"), private="body")
