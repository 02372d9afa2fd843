"""Ingredients: functions and settings that several methods share, such as balanced losses and sharpness.

Nothing here is a method or an add-on.
"""
