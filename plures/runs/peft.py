"""A client's LoRA as an adapter folder of `peft`: adapter_config.json and adapter_model.safetensors.

`PeftModel.from_pretrained(base, folder)` puts it beside the model that it was trained beside: for a Hugging Face folder
that model itself, else the plain module. Where the head is no part of that model, it is in head.safetensors.
"""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from plures.errors import UsageError
from plures.files import write_flushed
from plures.learn.adapters import CONVOLUTIONS
from plures.learn.task import Task
from plures.tree import Params

HEAD = "head.safetensors"
BEFORE = "base_model.model."  # which begins the names of tensors in such a folder


def write_adapter(folder: Path, task: Task, model: Params, base: str | None) -> int:
    """Write the LoRA of a personal model; returns the number of tensors. `base` is the folder of the model, if any."""
    config, tensors, head = as_peft(task, model, base)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_flushed(folder / "adapter_config.json", json.dumps(config, indent=2).encode())
        write_flushed(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
        if head:
            write_flushed(folder / HEAD, save(head))
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None
    return len(tensors) + len(head)


def as_peft(task: Task, model: Params, base: str | None) -> tuple[dict[str, Any], Params, Params]:
    """The settings, the tensors, and the head if it is no part of the model that `peft` knows."""
    if task.adapter is None or task.adapter.kind != "lora":
        raise UsageError("a folder of peft holds LoRA; run with --adapter lora:rank=4, or export another format")
    module, whole = task.template, task.frozen | model
    inside = getattr(module, "base_name", "")  # the part of our module that is the model of a folder
    prefix = f"{inside}." if inside else ""
    layers = [name.removesuffix(".adapter.lora_B") for name in whole if name.endswith(".adapter.lora_B")]
    ranks: dict[str, int] = {}
    tensors: Params = {}
    for layer in layers:
        own = layer.removeprefix(prefix)
        a, b = (whole[f"{layer}.adapter.lora_{part}"] for part in "AB")
        ranks[own] = len(a)
        for part, x in zip("AB", _as_layers(module.get_submodule(layer), layer, a, b), strict=True):
            tensors[f"{BEFORE}{own}.lora_{part}.weight"] = x.contiguous()
    head = {name: whole[name] for name in whole if task.is_head(name)}
    has_head = task.head.startswith(prefix)
    if has_head:
        tensors |= {BEFORE + name.removeprefix(prefix): x.contiguous() for name, x in head.items()}
    # Names are patterns there, and a name matches at its end: so each is written in whole.
    exact = {own: f"^{re.escape(own)}$" for own in ranks}
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": max(ranks.values()),
        "lora_alpha": task.adapter.scale * max(ranks.values()),
        "rank_pattern": {exact[own]: rank for own, rank in ranks.items()},
        "alpha_pattern": {exact[own]: task.adapter.scale * rank for own, rank in ranks.items()},
        "target_modules": "|".join(re.escape(own) for own in ranks),
        "modules_to_save": [task.head.removeprefix(prefix)] if has_head else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
    return config, tensors, {} if has_head else {name.rpartition(".")[2]: x.contiguous() for name, x in head.items()}


def _as_layers(layer: nn.Module, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices in the shapes of the layers that `peft` makes of them."""
    if isinstance(layer, nn.Linear):
        return a, b
    if not isinstance(layer, CONVOLUTIONS) or layer.groups != 1:
        raise UsageError(
            f"peft knows no LoRA like the one beside {name!r} ({type(layer).__name__}); leave it out with layers=, or "
            "export another format"
        )
    return a.reshape(-1, *layer.weight.shape[1:]), b.reshape(*b.shape, *[1] * (layer.weight.dim() - 2))
