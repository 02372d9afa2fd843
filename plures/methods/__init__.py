"""The methods, by name. To add one: write its file, import it here, add its line to the table."""

from collections.abc import Callable

from ..method import Method
from .afml import Afml
from .apfl import APFL
from .apple import Apple
from .ditto import Ditto
from .fedala import fedala
from .fedamp import FedAMP
from .fedavg import FedAvg
from .fedbn import fedbn
from .feddyn import feddyn
from .fedfomo import FedFomo
from .fedmeta import FedMeta
from .fedper import fedper
from .fedpermeta import FedPerMeta
from .fedphp import FedPHP
from .fedprox import fedprox
from .fedrep import FedRep
from .fedrod import FedRoD
from .fedsam import fedsam
from .heurpfedla import heurpfedla
from .lgfedavg import lgfedavg
from .local import Local
from .mtl import Mtl
from .partialfed import PartialFed
from .perfedavg import PerFedAvg
from .pfedhn import pfedhn
from .pfedla import pfedla
from .pfedme import PFedMe
from .plgu_ghn import plgu_ghn
from .plgu_grep import PlguGRep
from .plgu_lf import PlguLf
from .scaffold import scaffold

METHODS: dict[str, Callable[[], Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fedsam": fedsam,
    "perfedavg": PerFedAvg,
    "fedmeta": FedMeta,
    "fedpermeta": FedPerMeta,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "fedper": fedper,
    "fedrep": FedRep,
    "lgfedavg": lgfedavg,
    "fedbn": fedbn,
    "fedamp": FedAMP,
    "fedphp": FedPHP,
    "fedfomo": FedFomo,
    "apple": Apple,
    "partialfed": PartialFed,
    "pfedhn": pfedhn,
    "mtl": Mtl,
    "apfl": APFL,
    "fedala": fedala,
    "fedrod": FedRoD,
    "pfedla": pfedla,
    "heurpfedla": heurpfedla,
    "plgu-lf": PlguLf,
    "plgu-grep": PlguGRep,
    "plgu-ghn": plgu_ghn,
    "afml": Afml,
}
