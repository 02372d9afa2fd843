"""FT: the personal model is fine-tuned on the client's rows when it is asked for; training never sees it."""

from dataclasses import dataclass
from typing import ClassVar

from plures.methods.addons.base import Addon
from plures.methods.base import fine_tune, setting


@dataclass(frozen=True)
class Ft(Addon):
    """FedAvg-FT and the like: some epochs of plain training of the whole model, never uploaded."""

    ft_epochs: int = setting(5, "epochs of fine-tuning at evaluation", least=0)

    changes_training: ClassVar[bool] = False

    def personalize(self, task, received, client, shard):
        model = self.host.personalize(task, received, client, shard)
        return fine_tune(task, model, shard, self.solver, self.ft_epochs)

    @property
    def personal_model_name(self):
        return f"{self.host.personal_model_name}, fine-tuned"
