"""Federation: the same methods over a real network, on Flower, with TLS and keys.

`wire` says what travels, `server` and `client` are the two halves of a run, and only `flower` knows Flower. The
commands that users type are in `cli`.
"""
