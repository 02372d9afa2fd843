"""FedDyn: FedAvg with a dynamic regulariser that aligns each client's optimum with the global optimum.

Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

Local loss: F_i(v) - <gradient_i, v> + alpha/2 |v - w|^2, starting at the received model w; then
gradient_i <- gradient_i - alpha (v - w). The server keeps h <- h - alpha/N sum (w_i - w) and sends the plain mean of
the models minus h / alpha.

Differs from the paper: the server keeps h / alpha instead of h, so that alpha may be zero. BatchNorm statistics are
averaged and not regularised. With `gm=mean` the generic model is the plain mean, as in the authors' code.
"""

from plures.methods.addons.feddyn import FedDyn
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def feddyn() -> Method:
    """FedAvg with equal weights and the add-on feddyn."""
    return FedDyn(host=FedAvg(weights="uniform"))
