"""Ingredients: functions and settings that several methods share, such as balanced losses and SAM.

Nothing here is a method or an add-on.
"""
