"""Parts that methods wear: `ditto+ala`, `fedrod+prox`. A part is a method around a host method."""

from .ala import Ala
from .brm import Brm
from .c import C
from .feddyn import FedDyn
from .ft import Ft
from .part import Part
from .prox import Prox
from .sam import Sam
from .scaffold import Scaffold

PARTS: dict[str, type[Part]] = {
    "ft": Ft,
    "c": C,
    "ala": Ala,
    "sam": Sam,
    "prox": Prox,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "brm": Brm,
}
