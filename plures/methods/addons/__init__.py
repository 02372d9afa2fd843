"""Add-ons: what `+` adds to a method, as in `ditto+ala` or `fedrod+prox`; an add-on is a method around a host.

A method that stands alone is not here, even if it is named after an add-on: see the folder above.
"""
