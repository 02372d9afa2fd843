"""FT: the personal model is fine-tuned on the client's rows before it is evaluated; training stays as it is."""

from dataclasses import dataclass
from typing import ClassVar

from plures.methods.addons.base import Addon
from plures.methods.base import fine_tune, setting
from plures.methods.search import linear


@dataclass(frozen=True)
class Ft(Addon):
    """As in FedAvg-FT: the personal model is fine-tuned before evaluation; the result is never uploaded."""

    ft_epochs: int = setting(5, "epochs of fine-tuning before evaluation", least=0, search=linear(1, 10))

    changes_training: ClassVar[bool] = False

    def personalize(self, task, received, client, shard):
        model = self.host.personalize(task, received, client, shard)
        return fine_tune(task, model, shard, self.solver, self.ft_epochs)

    @property
    def personal_model_name(self):
        return f"{self.host.personal_model_name}, fine-tuned"
