"""Starting the ranks of a node and bringing their results back."""
