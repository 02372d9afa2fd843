"""Task: a module as pure functions of its parameters, and the parts that it is made of.

The module itself keeps no state between calls. BatchNorm statistics are entries of the model's
dict: in training, the *gradient* of any loss with respect to a statistic is the step that the
statistic has to take (`_Recorded`), so whatever trains a tree of tensors moves the statistics
too, and a pass whose gradient is not taken moves none. Padded rows of a batch count for nothing.
Dropout draws from the key of the batch. Frozen tensors are constants of the task: no dict has them.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from plures import seeds, tree
from plures.data.batches import Batch
from plures.data.dataset import TaskKind
from plures.engine import KernelCount, Size
from plures.errors import UsageError
from plures.learn import adapters
from plures.learn.augment import augment, refuse_other_than_images
from plures.learn.frozen import ALL_TRAIN, Chosen, fingerprint, frozen_names, in_words
from plures.learn.losses import ROW_LOSSES, masked_mean
from plures.learn.lower import CANNOT_CUT, Lower, Stub, lower_parts
from plures.learn.precision import in_bf16
from plures.learn.stock import (
    Dropout,
    PlainFunctions,
    calls_functions,
    has_fast_path,
    keeps_output,
    replacement,
    without_fast_path,
)
from plures.tree import Params

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


Loss = Callable[[Params, Batch], Tensor]


class _Recorded(torch.autograd.Function):
    """Passes values through; its backward gives the statistics the step they have to take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, mean: Tensor, var: Tensor, new_mean: Tensor, new_var: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean, var, new_mean, new_var = ctx.saved_tensors
        return gradient, mean - new_mean, var - new_var, None, None


class _Centred(torch.autograd.Function):
    """Values less the mean of their channel over the rows that a mask marks; that mean, and the variance.

    Its gradient is written out: what autograd makes of sums over masked values goes through them many more times.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axes = tuple(range(2, x.dim()))
        shares = (mask.to(x.dtype) / mask.sum()).unsqueeze(1)
        mean = ((x.mean(axes) if axes else x) * shares).sum(0)
        centred = x - mean.reshape(1, -1, *[1] * len(axes))
        squares = (torch.linalg.vector_norm(centred, dim=axes) if axes else centred).square() / x[0, 0].numel()
        return centred, mean, (squares * shares).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_mean: Tensor, of_var: Tensor) -> Any:
        mask, centred = ctx.saved_tensors
        shape = (*centred.shape[:2], *[1] * (centred.dim() - 2))
        shares = (mask.to(centred.dtype) / mask.sum()).unsqueeze(1) / centred[0, 0].numel()
        of_mean = of_mean - gradient.sum((0, *range(2, centred.dim())))
        along = (2 * shares * of_var).reshape(shape)
        return gradient + along * centred + (shares * of_mean).reshape(shape), None


class _BatchNormAsFunction(nn.Module):
    """BatchNorm over the rows that the mask marks, with its statistics given from outside."""

    mask: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: "nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d", name: str) -> None:
        super().__init__()
        self.name = name
        if original.momentum is None or not original.track_running_stats:
            raise UsageError(
                "BatchNorm with momentum=None or track_running_stats=False is not supported: "
                "its statistics cannot be shared; use the defaults, or GroupNorm"
            )
        self.eps, self.momentum = original.eps, original.momentum
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("running_mean", original.running_mean)
        self.register_buffer("running_var", original.running_var)
        self.mask = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        x = x.to(self.running_mean.dtype)  # in mixed precision, means and variances are float32
        if self.training:
            centred, mean, var = _Centred.apply(x, self.mask)
        else:
            mean, var = self.running_mean.detach(), self.running_var.detach()  # in inference they are constants
            centred = x - mean.reshape(shape)
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            y = centred * (scale * self.weight).reshape(shape) + self.bias.reshape(shape)
        else:
            y = centred * scale.reshape(shape)
        if not self.training:
            return y
        count = self.mask.sum() * (x[0, 0].numel())
        unbiased = var * count / (count - 1).clamp(min=1)
        old_mean, old_var = self.running_mean, self.running_var
        new_mean = torch.lerp(old_mean, mean, self.momentum).detach()
        new_var = torch.lerp(old_var, unbiased, self.momentum).detach()
        return _Recorded.apply(y, old_mean, old_var, new_mean, new_var)


def _child(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


def _without_hidden_state(module: nn.Module) -> nn.Module:
    """A copy in which layers take what they need from outside, and are made of operations that can be stacked."""
    module = copy.deepcopy(module)
    for stream, (path, child) in enumerate(list(module.named_modules())):
        new = _BatchNormAsFunction(child, path) if isinstance(child, BATCH_NORMS) else replacement(child, stream)
        if new is not None:
            parent, name = _child(module, path)
            setattr(parent, name, new)
    return module


class _Body:
    """A module without its head, and the places where its tensors are put for a call.

    `torch.func.functional_call` does the same, but walks through all modules at every call.
    """

    def __init__(self, module: nn.Module, names: list[str], frozen: Params) -> None:
        self.module = module
        self.masked = [m for m in module.modules() if isinstance(m, _BatchNormAsFunction)]
        self.keyed = [m for m in module.modules() if isinstance(m, Dropout)]
        places = {name: self._places(name) for name in (*names, *frozen)}
        self.slots = [(name, *place) for name in names for place in places[name]]
        for name, x in frozen.items():  # which stay in their places: one copy serves all calls and clients
            for place, key in places[name]:
                place[key] = x

    def copy(
        self, change: Callable[[nn.Module], nn.Module], params: Params, names: list[str], frozen: Params
    ) -> "_Body":
        """The same for a changed copy of the module. In its places are tensors meanwhile: by them they are found."""
        for name, place, slot in self.slots:
            place[slot] = params[name]
        try:
            return _Body(change(self.module), names, frozen)
        finally:
            for _, place, slot in self.slots:
                place[slot] = None

    def _places(self, name: str) -> list[tuple[dict[str, Any], str]]:
        """Where a tensor stands in the module: in more than one place, if layers share it."""
        parent, key = _child(self.module, name)
        if key in parent._buffers:
            return [(parent._buffers, key)]
        own = parent._parameters[key]
        modules = self.module.modules()
        return [(m._parameters, k) for m in modules for k, x in m._parameters.items() if x is own]

    def on(self, move: Callable[[Tensor], Tensor]) -> "_Body":
        """A copy in which the tensors that stay in their places are moved: frozen ones, and buffers of the module."""
        groups = [group for m in self.module.modules() for group in (m._parameters, m._buffers, vars(m))]
        held = [x for group in groups for x in group.values() if isinstance(x, Tensor)]
        return copy.deepcopy(self, {id(x): move(x) for x in held})


class Task:
    """What there is to learn: a model as pure functions, and the names of its parts."""

    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        n_classes: int,
        kind: TaskKind = "classes",
        chosen: Chosen = ALL_TRAIN,
    ) -> None:
        """`example` is one row of data, without the batch axis; `kind` says what the outputs of the module are, and
        `chosen` which tensors train."""
        self.n_classes, self.kind = n_classes, kind
        self.example = example
        self._loss: Loss | None = None  # in place of cross-entropy
        self._public: Batch | None = None
        self.template = copy.deepcopy(module)
        self.adapter = adapters.parse(chosen.adapter) if chosen.adapter else None
        if self.adapter is not None:
            module = adapters.adapted(copy.deepcopy(module), self.adapter, _find_head(module, n_classes))
        self._augmentation: tuple[str, ...] = ()
        self._is_bf16 = False  # whether the model computes in bfloat16
        self._has_functions = has_fast_path(module)  # whether calls of functions have to be met
        whole: Params = {
            name: value.detach().clone()
            for name, value in module.state_dict().items()
            if name in dict(module.named_parameters()) or tree.is_statistic(name)
        }
        self.head = _find_head(module, n_classes)
        _refuse_shared_head(module, self.head)
        frozen = frozen_names(module, whole, self.head, chosen)
        self.initial: Params = tree.drop(whole, frozen.__contains__)  # what trains
        self.frozen: Params = tree.keep(whole, frozen.__contains__)  # what does not: no part of any state or message
        self.layers = _trained_part(_find_layers(module, self.head), frozen)
        self.blocks = _trained_part(_find_blocks(module, _find_layers(module, self.head)), frozen)
        self._batch_norms = [name for name, m in module.named_modules() if isinstance(m, BATCH_NORMS)]
        self._norms = self._batch_norms + [
            name for name, m in module.named_modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm))
        ]
        body = _without_hidden_state(module)
        parent, name = _child(body, self.head)
        setattr(parent, name, nn.Identity())
        names = [name for name in self.initial if not self.is_head(name)]
        of_body = tree.drop(self.frozen, self.is_head)
        self._inference = _Body(copy.deepcopy(body).eval(), names, of_body)
        self._training = _Body(body.train(), names, of_body)
        for norm in self._training.masked:
            norm.train(f"{norm.name}.running_mean" not in frozen)  # a frozen one computes as in inference
        self._training.masked = [norm for norm in self._training.masked if norm.training]
        self._layer_of = {name: layer for layer, names in self.layers.items() for name in names}
        self._block_of = {name: block for block, names in self.blocks.items() for name in names}
        self._whole: Task | None = None
        self._start: Lower | None = None  # where rows are what a lower part gives: what they start from
        self._check(module)
        self.lower: Lower | None = self._find_lower() if self.frozen else None  # frozen layers that come first

    # Parts

    def whole(self, params: Params) -> Params:
        """A model with its frozen tensors, as `load_state_dict` of the module takes it; adapters are merged."""
        whole = self.frozen | params
        return whole if self.adapter is None else adapters.merged(whole, self.adapter.scale)

    @property
    def trained_in_words(self) -> str:
        """Which weights train; empty if all do."""
        return in_words(self.initial, self.frozen)

    @cached_property
    def frozen_fingerprint(self) -> str:
        """SHA-256 of the frozen tensors; empty if there are none."""
        return fingerprint(self.frozen)

    def is_head(self, name: str) -> bool:
        """Weights and bias of the last linear layer."""
        return name.startswith(self.head + ".")

    def is_batch_norm(self, name: str) -> bool:
        """Weights and statistics of BatchNorm, by type of module and not by its name."""
        return name.rpartition(".")[0] in self._batch_norms

    def is_norm(self, name: str) -> bool:
        """Weights and statistics of any normalisation layer."""
        return name.rpartition(".")[0] in self._norms

    def layer_of(self, name: str) -> str:
        """The layer that a tensor belongs to."""
        return self._layer_of[name]

    def layers_in(self, names: Iterable[str]) -> list[str]:
        """The layers that these tensors belong to, from the input to the head."""
        present = {self._layer_of[name] for name in names}
        return [layer for layer in self.layers if layer in present]

    def block_of(self, name: str) -> str:
        """The block that a tensor belongs to: a group of layers that the model declares, or else its layer."""
        return self._block_of[name]

    def blocks_in(self, names: Iterable[str]) -> list[str]:
        """The blocks that these tensors belong to, from the input to the head."""
        present = {self._block_of[name] for name in names}
        return [block for block in self.blocks if block in present]

    @property
    def smallest_batch(self) -> int:
        """BatchNorm learns nothing from a batch of one, so such a last batch is left out."""
        return 2 if self._training.masked else 1

    @cached_property
    def flops(self) -> int:
        """Multiplications and additions of one row's forward pass."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.logits(self.initial, self.example.unsqueeze(0))
        return counter.get_total_flops()

    @cached_property
    def n_kernels(self) -> int:
        """How many kernels a forward pass calls, however many rows it has."""
        with KernelCount() as calls, torch.no_grad():
            self.logits(self.initial, self.example.unsqueeze(0))
        return calls.n

    @cached_property
    def row_bytes(self) -> int:
        """What the outputs of all layers take for one row: a measure of the memory of a forward pass."""
        sizes: list[int] = []

        def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
            sizes.extend(x.nbytes for x in tree.leaves(output) if isinstance(x, Tensor))  # some give more than one

        hooks = [
            module.register_forward_hook(count)
            for module in self._inference.module.modules()
            if keeps_output(module) and not isinstance(module, Stub)
        ]
        with torch.no_grad():
            self.features(self.initial, self.example.unsqueeze(0))
        for hook in hooks:
            hook.remove()
        return sum(sizes) + self.example.nbytes

    @cached_property
    def size(self) -> Size:
        """What the cost of a step is estimated from."""
        has_convolutions = any(x.dim() == 4 for x in self.initial.values())
        elsewhere = self.example.device.type != "cpu"
        return Size(self.flops, self.n_kernels, self.row_bytes, tree.n_bytes(self.initial), has_convolutions, elsewhere)

    # Inference

    def features(self, params: Params, x: Tensor) -> Tensor:
        """What the head sees, in inference mode."""
        return self._call(self._inference, params, x)

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """The head: logits from features."""
        if self._is_bf16:
            with in_bf16(features.device):
                return self._classify(params, features).float()
        return self._classify(params, features)

    def _classify(self, params: Params, features: Tensor) -> Tensor:
        weight, bias = self.head + ".weight", self.head + ".bias"
        return F.linear(
            features,
            self.frozen[weight] if weight in self.frozen else params[weight],
            self.frozen[bias] if bias in self.frozen else params.get(bias),
        )

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Logits in inference mode."""
        return self.classify(params, self.features(params, x))

    def as_module(self, params: Params) -> nn.Module:
        """A copy of the module with these weights."""
        module = copy.deepcopy(self.template)
        own = params if self.adapter is None else self.whole(params)
        module.load_state_dict({name: x.clone() for name, x in own.items()}, strict=False)
        return module

    # Training

    def training_features(self, params: Params, batch: Batch) -> Tensor:
        """What the head sees, in training mode: batch statistics, dropout."""
        self._show(batch.mask, batch.key)
        try:
            x = augment(self._augmentation, batch.x, batch.key) if self._augmentation else batch.x
            return self._call(self._training, params, x, batch.key)
        finally:
            self._show(torch.ones(1), torch.tensor(0))  # nothing of a batch is kept

    def _show(self, mask: Tensor, key: Tensor) -> None:
        for norm in self._training.masked:
            norm.mask = mask
        for dropout in self._training.keyed:
            dropout.key = key

    def training_logits(self, params: Params, batch: Batch) -> Tensor:
        """Logits in training mode."""
        return self.classify(params, self.training_features(params, batch))

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Mean loss of a batch, in training mode; or what `judged_by` put in its place."""
        if self._loss is not None:
            return self._loss(params, batch)
        return self.loss_of(self.training_logits(params, batch), batch)

    def row_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every row: cross-entropy for classes, the squared error for a number, and so on."""
        return ROW_LOSSES[self.kind](outputs, y)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss of outputs for the rows of a batch."""
        return masked_mean(self.row_losses(outputs, batch.y), batch.mask)

    @property
    def public(self) -> Batch:
        """The rows that everybody may see, for methods that ask for some."""
        if self._public is None:
            raise UsageError("this method needs public rows, and the task has none; see `Task.with_public`")
        return self._public

    def with_public(self, x: Tensor, y: Tensor) -> "Task":
        """The same task with rows that everybody may see."""
        changed = copy.copy(self)
        counts = torch.bincount(y.flatten(), minlength=self.n_classes).to(torch.float32)
        changed._public = Batch(x, y, torch.ones(len(x)), counts, torch.tensor(0))
        return changed

    def in_bf16(self) -> "Task":
        """The same task, whose model computes in bfloat16; weights, statistics, logits and losses are float32."""
        changed = copy.copy(self)
        changed._is_bf16 = True
        return changed

    def on(self, device: torch.device) -> "Task":
        """The same task with its tensors on a device. The module that `as_module` gives stays on the CPU."""
        if device == self.example.device:
            return self
        moved_once: dict[int, Tensor] = {}

        def move(x: Tensor) -> Tensor:
            if id(x) not in moved_once:
                moved_once[id(x)] = x.detach().to(device)
            return moved_once[id(x)]

        changed = copy.copy(self)
        vars(changed).pop("size", None)  # which depends on the device
        changed.example = move(self.example)
        changed.initial, changed.frozen = tree.map(move, self.initial), tree.map(move, self.frozen)
        changed._public = None if self._public is None else Batch(*map(move, self._public))
        changed._inference, changed._training = self._inference.on(move), self._training.on(move)
        return changed

    def with_augmentation(self, kinds: tuple[str, ...]) -> "Task":
        """The same task, whose training images are changed at random."""
        refuse_other_than_images(kinds, self.example)
        changed = copy.copy(self)
        changed._augmentation = kinds
        return changed

    def judged_by(self, loss: "Loss") -> "Task":
        """The same task with another loss to train by."""
        changed = copy.copy(self)
        changed._loss = loss
        return changed

    def _call(self, body: "_Body", params: Params, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The body with these tensors in the places of its own, which hold nothing between calls."""
        if self._is_bf16:
            with in_bf16(x.device):
                return self._call_body(body, params, x, key).float()
        return self._call_body(body, params, x, key)

    def _call_body(self, body: "_Body", params: Params, x: Tensor, key: Tensor | None) -> Tensor:
        try:
            for name, place, slot in body.slots:
                place[slot] = params[name]
            if not self._has_functions:
                return self._run(body, x, None)
            with PlainFunctions(torch.tensor(0) if key is None else key) as functions, without_fast_path():
                return self._run(body, x, functions)
        finally:
            for _, place, slot in body.slots:
                place[slot] = None

    def _run(self, body: "_Body", x: Tensor, functions: PlainFunctions | None) -> Tensor:
        if self._start is None or self._start.upper is None:
            return body.module(x)
        values, rows = self._start.unpack(x)
        given = self._start.upper.given
        try:
            given.begin(values, len(x), functions)
            return body.module(rows)
        finally:
            given.end()

    # The frozen layers that come first

    def _find_lower(self) -> Lower | None:
        """The largest lower part with which the model computes what it does without. It computes as in inference."""
        of_body = [name for name in self.initial if not self.is_head(name)]
        frozen = [name for name in self.frozen if not self.is_head(name)]
        if not frozen:
            return None

        def features(x: Tensor) -> Tensor:
            return self.features(self.initial, x)

        for lower in lower_parts(self._inference.module, of_body, frozen, features, self.example):
            changed = self._in_inference(lower)
            try:
                if self._agrees(lower):
                    return lower
            except CANNOT_CUT:
                pass
            for module in changed:
                module.training = True
        return None

    def _in_inference(self, lower: Lower) -> list[nn.Module]:
        """Let the frozen layers below the cut compute as in inference; those for which this is a change."""
        body = self._training.module
        tops = [body] if lower.upper is None else [body.get_submodule(path) for path in lower.upper.stubs]
        changed = [module for top in tops for module in top.modules() if module.training]
        for module in changed:
            module.training = False
        return changed

    def _agrees(self, lower: Lower) -> bool:
        """Whether starting from what the lower part gives is the same as starting from rows."""
        lower.keeps_row = lower.upper is not None and not self.example.is_floating_point()
        if self._is_same_from(lower):
            return True
        if lower.upper is None or lower.keeps_row:
            return False
        lower.keeps_row = True  # the rest of the model looks at the rows themselves, too
        return self._is_same_from(lower)

    def _is_same_from(self, lower: Lower) -> bool:
        upper, mask, counts = self.starting_from(lower), torch.ones(3), torch.ones(self.n_classes)
        with torch.no_grad():
            x = torch.stack([self.example] * 3)
            if x.is_floating_point():
                x = x + torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
            kept, y = lower.run(x), torch.zeros(3, dtype=torch.long)
            for one, other in (
                (self.features(self.initial, x), upper.features(self.initial, kept)),
                (
                    self.training_features(self.initial, Batch(x, y, mask, counts, torch.tensor(5))),
                    upper.training_features(self.initial, Batch(kept, y, mask, counts, torch.tensor(5))),
                ),
            ):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                    return False
        return True

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        return bool(self._augmentation)

    def started_by(self, whole: "Task") -> bool:
        """Whether this task was made from another one by `starting_from`."""
        return self._whole is whole

    def starting_from(self, lower: Lower) -> "Task":
        """The same task for rows that went through its lower part before. Weights have the same names and shapes."""
        changed = copy.copy(self)
        for known in ("flops", "n_kernels", "row_bytes", "size"):
            changed.__dict__.pop(known, None)
        changed._whole = self
        changed.lower, changed._start, changed.example = None, lower, lower.run(self.example.unsqueeze(0))[0]
        if self._public is not None:
            changed._public = self._public._replace(x=lower.run(self._public.x))
        names = [name for name in self.initial if not self.is_head(name)]
        frozen = tree.drop(self.frozen, self.is_head)
        if lower.upper is None:
            changed._inference = changed._training = _Body(nn.Identity(), [], {})
            changed._has_functions = False
            return changed
        above = tree.drop(frozen, lower.upper.is_below)
        changed._inference, changed._training = (
            body.copy(lower.upper.of, self.initial, names, above) for body in (self._inference, self._training)
        )
        changed._training.masked = [norm for norm in changed._training.masked if norm.training]
        return changed

    def _check(self, module: nn.Module) -> None:
        """The head must be the last thing the model does, and nothing random may be hidden in it."""
        x = torch.stack([self.example, self.example])
        reference = copy.deepcopy(module).eval()
        with torch.no_grad():
            try:
                expected = reference(x)
            except Exception as error:
                raise UsageError(f"the model cannot read rows of shape {tuple(self.example.shape)}: {error}") from error
            if expected.shape[-1] != self.n_classes:
                has = {"classes": "classes", "labels": "labels"}.get(self.kind, "number to predict")
                raise UsageError(f"the model gives {expected.shape[-1]} logits, the data has {self.n_classes} {has}")
            try:
                same = torch.allclose(expected, self.logits(self.initial, x), atol=1e-5)
            except RuntimeError:
                same = False
            if not same:
                raise UsageError(
                    f"the model's output is not that of its last linear layer {self.head!r}; return the plain "
                    "logits of that layer, with no softmax or scaling after it"
                )
            batch = Batch(
                x, torch.zeros(2, dtype=torch.long), torch.ones(2), torch.ones(self.n_classes), torch.tensor(0)
            )
            with torch.random.fork_rng(devices=[]):
                self._has_functions |= calls_functions(
                    lambda: (self.logits(self.initial, x), self.training_features(self.initial, batch))
                )
                once, again = (self.training_features(self.initial, batch) for _ in range(2))
            if not torch.equal(once, again):
                raise UsageError(
                    "the model draws random numbers of its own in training; use nn.Dropout or "
                    "torch.nn.functional.dropout, whose numbers can be repeated"
                )


def _find_head(module: nn.Module, n_classes: int) -> str:
    declared = getattr(module, "head_name", None)
    linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    if declared is not None:
        if declared not in linear:
            raise UsageError(f"the model's head_name {declared!r} is not one of its linear layers: {', '.join(linear)}")
        return str(declared)
    if not linear:
        raise UsageError("the model has no linear layer to be its head; end it with nn.Linear(features, n_classes)")
    return linear[-1]


def _refuse_shared_head(module: nn.Module, head: str) -> None:
    """Raise if the head has no weights of its own: methods treat it apart from the rest."""
    weight = module.get_submodule(head).weight
    places = [name for name, x in module.named_parameters(remove_duplicate=False) if x is weight]
    if places != [f"{head}.weight"]:
        others = [name for name in places if name != f"{head}.weight"]
        why = f"shares its weights with {others[0]}" if others else "computes its weights from other tensors"
        raise UsageError(f"the model's head {head!r} {why}; give the last linear layer weights of its own")


def _find_layers(module: nn.Module, head: str) -> dict[str, tuple[str, ...]]:
    """Layer -> its tensors: the modules that own tensors, in their order; the head is last."""
    own = {name for name, _ in module.named_parameters()}
    layers: dict[str, list[str]] = {}
    for name in module.state_dict():
        if name in own or tree.is_statistic(name):
            layers.setdefault(name.rpartition(".")[0] or "model", []).append(name)
    layers[head] = layers.pop(head)
    return {layer: tuple(names) for layer, names in layers.items()}


def _trained_part(groups: dict[str, tuple[str, ...]], frozen: set[str]) -> dict[str, tuple[str, ...]]:
    """Layers or blocks without frozen tensors; those that have no others are left out."""
    rest = {group: tuple(name for name in names if name not in frozen) for group, names in groups.items()}
    return {group: names for group, names in rest.items() if names}


def _find_blocks(module: nn.Module, layers: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Block -> its tensors: the groups of layers that the model declares in their order, or else the layers."""
    declared: list[str] | None = getattr(module, "block_names", None)
    if declared is None:
        return layers
    blocks: dict[str, tuple[str, ...]] = {block: () for block in declared}
    for layer, names in layers.items():
        inside = [block for block in declared if layer == block or layer.startswith(block + ".")]
        if not inside:
            raise UsageError(f"the model's block_names leave out {layer!r}; name a block that holds it")
        blocks[inside[0]] += names
    return blocks


def build(
    make: Callable[[], nn.Module],
    example: Tensor,
    n_classes: int,
    seed: int,
    kind: TaskKind = "classes",
    chosen: Chosen = ALL_TRAIN,
) -> Task:
    """A task whose initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.key_of(seed, "initial weights"))
        module = make()
        if isinstance(module, nn.Linear):  # which is all head, and has no name
            module = nn.Sequential(OrderedDict(head=module))
        return Task(module, example, n_classes, kind, chosen)  # in here: adapters are drawn from the seed, too
