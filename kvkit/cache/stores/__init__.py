"""Where a layer's rows lie."""
