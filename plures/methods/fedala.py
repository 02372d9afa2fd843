"""FedALA: FedAvg whose clients start local training from a learned blend of their own and the received model.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, 2023.

The idea, adaptive local aggregation (ALA), is implemented in `addons/ala.py`, which works around other methods too.

    start = own + W * (received - own)              in the upper p layers; in lower layers start = received
    W <- clip(W - eta * dF(start)/dW, 0, 1)         with one number for every weight

W is learned on s percent of the client's rows: the first time until the loss settles, in every later round for one
epoch. Local training then begins at `start`.

Differs from the paper: the first stage ends after `cap` epochs at the latest. Whether it is the first time is decided
for each client, not by the round. The s percent are a random subset, where the authors' code takes a window; as there,
every epoch visits them in the same order.
"""

from plures.methods.addons.ala import Ala
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedala() -> Method:
    """FedAvg with the add-on ala."""
    return Ala(host=FedAvg())
