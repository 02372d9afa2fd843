"""FedPer: FedAvg in which every client keeps its head to itself.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

Body and head are trained together; only the body travels.

Differs from the paper: the head is the last linear layer. `pm=local` scores the client's last trained
model; by default it is the server's body under the client's head.
"""

from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedper() -> Method:
    return KeepLocal(host=FedAvg(), private="head")
