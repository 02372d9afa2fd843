"""Public: every client also trains on a few rows of each class that everybody may see (Zhao et al., 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from plures.methods.addons.base import Addon
from plures.methods.base import setting
from plures.methods.search import linear


@dataclass(frozen=True)
class Public(Addon):
    """The public rows are taken from the clients and added to the training rows of each of them."""

    rows_each: int = setting(10, "public rows of each class", least=1, search=linear(1, 20).if_named())

    changes_training: ClassVar[bool] = False

    @property
    def public_rows(self):
        return max(self.rows_each, self.host.public_rows)

    @property
    def trains_on_public(self):
        return True
