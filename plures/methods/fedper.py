"""FedPer: FedAvg with a private head per client: only the body is sent and averaged.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

Body and head are trained together.

Differs from the paper: the head is the last linear layer. By default the personal model is the server's body with the
client's head; with `pm=local` it is the model that the client last trained.
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedper() -> Method:
    """FedAvg with a private head."""
    return KeepLocal(host=FedAvg(), private="head")
