"""FedDyn: FedAvg with a dynamic term that makes the optima of clients agree with that of all.

Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

Local loss: F_i(v) - <gradient_i, v> + alpha/2 |v - w|^2, from v = w as received; then
gradient_i <- gradient_i - alpha (v - w). The server keeps h <- h - alpha/N sum (w_i - w) and sends the plain
mean of models minus h / alpha.

Differs from the paper: h / alpha is kept instead of h, so that alpha may be zero; statistics of BatchNorm
are averaged and have no dynamic term. `gm=mean` scores the plain mean, as the authors' code does.
"""

from plures.methods.addons.feddyn import FedDyn
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def feddyn() -> Method:
    return FedDyn(host=FedAvg(weights="uniform"))
