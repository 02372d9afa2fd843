"""The methods, by name. To add one: write its file, import it here, add its line to the table."""

from collections.abc import Callable

from ..method import Method
from .ditto import Ditto
from .fedala import fedala
from .fedavg import FedAvg
from .fedbn import fedbn
from .fedprox import fedprox
from .fedrep import FedRep
from .fedrod import FedRoD
from .local import Local
from .pfedla import pfedla

METHODS: dict[str, Callable[[], Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": fedprox,
    "ditto": Ditto,
    "fedrep": FedRep,
    "fedbn": fedbn,
    "fedala": fedala,
    "fedrod": FedRoD,
    "pfedla": pfedla,
}
