"""The command line: what users type and what they see printed.

It calls the other rooms and computes nothing itself.
"""
