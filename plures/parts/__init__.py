"""Parts that methods wear: `ditto+ala`, `fedrod+prox`. A part is a method around a host method."""

from .ala import Ala
from .part import Part
from .prox import Prox

PARTS: dict[str, type[Part]] = {
    "ala": Ala,
    "prox": Prox,
}
