"""SCAFFOLD: FedAvg with control variates that correct each local step towards the mean gradient of all clients.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020 (option II).

Local step: y <- y - lr * (g(y) - c_i + c), from the received model x. Then c_i <- c_i - c + (x - y) / reach, where
reach is how far the steps move along a constant gradient of one: steps * lr for plain SGD, more with momentum. The
server takes the plain mean of the models and adds 1/N of the sum of all changes of c_i to c.

Differs from the paper: with momentum, the paper's steps * lr would inflate the control variates up to tenfold, so reach
includes what momentum adds. BatchNorm statistics are averaged and have no control variate.
"""

from plures.methods.addons.scaffold import Scaffold
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def scaffold() -> Method:
    """FedAvg with equal weights and the add-on scaffold."""
    return Scaffold(host=FedAvg(weights="uniform"))
