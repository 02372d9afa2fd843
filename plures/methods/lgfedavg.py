"""LG-FedAvg: FedAvg with a private body per client: only the head is sent and averaged.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020.

Differs from the paper: training starts from the common initial model, not from a model that FedAvg trained before; and
no model is chosen by its accuracy on test rows.
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def lgfedavg() -> Method:
    """FedAvg with equal weights and a private body."""
    return KeepLocal(host=FedAvg(weights="uniform"), private="body")
