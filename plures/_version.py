"""The version, in one place: the package, its metadata and every record that a run leaves read it here."""

__version__ = "0.2.0"
