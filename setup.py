"""Metadata lives in pyproject.toml; this file lets tools that look for it find the package."""

from setuptools import setup

setup()
