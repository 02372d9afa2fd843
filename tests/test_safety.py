"""Nothing that this library reads can run code: no file of it unpickles.

One file of torch is read, the weights of EfficientNet-Lite0: its SHA-256 is compared before it is opened, and torch's
restricted loader, which knows tensors and plain containers alone, opens it.
"""

import re
from pathlib import Path

import pytest

import plures

FILES = sorted(Path(plures.__file__).parent.rglob("*.py"))
UNSAFE = re.compile(r"\b(pickle|joblib|dill|cloudpickle|marshal|shelve|torch\.load|yaml\.load)\b|allow_pickle=True")


RESTRICTED = {
    "models/efficientnet.py": ['return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)']
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_library_code_unpickles_nothing(path):
    found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if UNSAFE.search(line)]
    assert found == RESTRICTED.get(str(path.relative_to(FILES[0].parent)), [])


def test_the_search_would_find_an_unsafe_line():
    assert all(
        UNSAFE.search(line)
        for line in ("x = torch" + ".load(f)", "import " + "pickle", "np.load(f, allow_pickle=True)")
    )
    assert not UNSAFE.search("np.load(file, allow_pickle=False)")
