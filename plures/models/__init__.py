"""Models: plain `nn.Module` classes by name, each made from the shape of a row and the number of classes.

Training is not here.
"""
