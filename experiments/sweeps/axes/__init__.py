"""Axes: what a sweep may vary, and how their values are written.

An axis is a part of the machine by name, one figure of it, a number of the workload, or a setting
of the update rule. Values are a list ``a,b,c`` of names or numbers; of numbers also ranges:
``lo:hi:step``, or ``lo:hi:xN``, which multiplies by N.
"""
