"""Devices, process groups, collectives."""
