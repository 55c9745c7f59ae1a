"""The engines of attention. Each is machine code (params, block, tile) that multiplies one kind of tile."""
