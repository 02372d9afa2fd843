"""The same methods over a real network, on Flower.

`wire` says what travels, `rounds` is the server's half and `node` a client's half of a run; none of the
three knows Flower. `flower` carries their messages, `home` makes certificates and keys, `commands` is
what users type.
"""
