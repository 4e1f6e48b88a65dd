"""What is not public in torch and Lightning, and how objects of theirs are patched and restored."""
