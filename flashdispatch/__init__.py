"""flashdispatch."""
