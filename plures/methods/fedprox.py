"""FedProx: FedAvg whose local training is pulled towards the received model.

Li et al., Federated Optimization in Heterogeneous Networks, 2020.

Local loss: F_i(v) + mu/2 |v - w|^2, with w as received; statistics of BatchNorm are left out.

Differs from the paper: local problems are solved by a fixed number of epochs or steps, not to a
given inexactness.
"""

from plures.methods.addons.prox import Prox
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedprox() -> Method:
    return Prox(host=FedAvg())
