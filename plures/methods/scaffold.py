"""SCAFFOLD: FedAvg whose local steps are turned, by control variates, towards the gradient of all clients.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020 (option II).

Local step: y <- y - lr * (g(y) - c_i + c). Then c_i <- c_i - c + (x - y) / (reach), where reach is how far
the steps go along a gradient of one: steps * lr for plain SGD, more with momentum. The server moves to the
plain mean of models and adds (1/N) of the changes of controls to c.

Differs from the paper: with momentum the paper's steps * lr would inflate the controls up to tenfold, so
what momentum adds is counted. Statistics of BatchNorm are averaged and have no control.
"""

from plures.methods.addons.scaffold import Scaffold
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def scaffold() -> Method:
    return Scaffold(host=FedAvg(weights="uniform"))
