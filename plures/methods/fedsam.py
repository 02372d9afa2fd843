"""FedSAM: FedAvg with SAM: local steps use the gradient at weights perturbed towards a higher loss.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, 2022.

Local step: eps = rho * g / |g| with g the gradient at v, then v <- v - lr * (gradient at v + eps), both on the same
batch. BatchNorm statistics are updated in the first pass only.

Differs from the paper: nothing in the method. All clients have equal weights in the mean, as in the PLGU paper's
set-up.
"""

from plures.methods.addons.sam import Sam
from plures.methods.base import Method
from plures.methods.fedavg import FedAvg


def fedsam() -> Method:
    """FedAvg with equal weights and the add-on sam."""
    return Sam(host=FedAvg(weights="uniform"))
