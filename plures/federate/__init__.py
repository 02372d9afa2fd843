"""Federation: the same methods over a real network, on Flower, with TLS and keys.

`wire` defines the messages, `server` and `client` are the two sides of a run, and `flower` is the interface to Flower.
The commands that users type are in `cli`.
"""
