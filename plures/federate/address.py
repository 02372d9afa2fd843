"""The address of a server, and the certificate to verify it with. It needs neither Flower nor torch."""

import socket
from pathlib import Path
from typing import NamedTuple


class Address(NamedTuple):
    """The address of a server, and the certificate to verify it with."""

    host: str
    port: int
    ca: Path | None  # certificate of the authority; None for plain HTTP

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def certificate(self) -> bytes | None:
        """The certificate of the authority; None for plain HTTP."""
        return self.ca.read_bytes() if self.ca is not None else None

    def is_listening(self) -> bool:
        """Whether a process listens at this address."""
        try:
            with socket.create_connection((self.host, self.port), timeout=2):
                return True
        except OSError:
            return False
