"""The memory and the files that hold a layer's rows."""
