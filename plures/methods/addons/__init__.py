"""Add-ons: what `+` adds to a method, as in `ditto+ala` or `fedrod+prox`. An add-on is a method around a host.

Methods that are named after an add-on, such as FedALA, are in the folder above.
"""
