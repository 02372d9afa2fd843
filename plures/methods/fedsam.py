"""FedSAM: FedAvg whose local steps take their gradients where the loss is sharpest.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, 2022.

Local step: eps = rho * g / |g| with g the gradient at v, then v <- v - lr * (gradient at v + eps), the same
batch for both. Statistics of BatchNorm move in the first pass only.

Differs from the paper: nothing in the method. The mean is uniform, as in the PLGU paper's set-up.
"""

from plures.methods.addons.sam import Sam
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedsam() -> Method:
    return Sam(host=FedAvg(weights="uniform"))
