"""Imported last by the server that ranks are forked from: the collector need not look at what is imported by then.

A collection would take half a second, and copy the pages of a million objects that all ranks share.
"""

import gc

gc.collect()
gc.freeze()
