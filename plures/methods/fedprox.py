"""FedProx: FedAvg with a proximal term that keeps local training close to the received model.

Li et al., Federated Optimization in Heterogeneous Networks, 2020.

Local loss: F_i(v) + mu/2 |v - w|^2, where w is the received model; BatchNorm statistics are left out of the second
term.

Differs from the paper: clients train for a fixed number of epochs or steps, not to a given inexactness.
"""

from plures.methods.addons.prox import Prox
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedprox() -> Method:
    """FedAvg with the add-on prox."""
    return Prox(host=FedAvg())
