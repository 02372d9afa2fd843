"""Write plures/bundled/digits.npz from the copy of the digits that scikit-learn distributes.

Needs scikit-learn, which the package itself does not: `pip install scikit-learn`, then
`python scripts/make_digits.py`. The same versions of numpy and zlib write the same bytes every time.
"""

import hashlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).resolve().parent.parent / "plures" / "bundled" / "digits.npz"


def main() -> None:
    digits = load_digits()
    x, y = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    if not (np.array_equal(x, digits.images) and x.shape == (1797, 8, 8) and x.max() == 16):
        raise SystemExit("these are not the 1,797 digits of 8x8 pixels from 0 to 16 that the package expects")
    # numpy gives every member of the archive the same fixed date, so no clock gets into the bytes.
    np.savez_compressed(TARGET, x=x, y=y)
    content = TARGET.read_bytes()
    print(f"{TARGET.name}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
