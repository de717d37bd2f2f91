"""What the process that ranks are forked from imports, before there is any rank."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
