"""Imported by the server that ranks are forked from before the package: what others have as their own by then."""

import sys

import transformers.modeling_utils  # noqa: F401

from tests.internals.replaced_script import differing, snapshot

assert "lightning_automodel" not in sys.modules
BEFORE = snapshot()
import lightning_automodel  # noqa: E402, F401

AT_IMPORT = differing(BEFORE)
