"""The engines of attention: machine code (params, block, tile) that multiplies one kind of tile."""
