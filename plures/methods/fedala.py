"""FedALA: FedAvg whose clients start from a learned blend of their own and the received model.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, 2023.

In the upper p layers a client starts from own + W * (received - own), with a W in [0, 1] for every
weight, learned by gradient steps through that very line on s percent of its rows: until the loss
settles the first time, one epoch in every later round. Lower layers are taken as received.

Differs from the paper: the first stage ends after `cap` epochs in any case; whether it is a
client's first time is counted for each client, not by the round; the s percent are a random
subset, where the authors' code takes a window; as there, every epoch meets them in one order.
"""

from plures.methods.addons.ala import Ala
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedala() -> Method:
    return Ala(host=FedAvg())
