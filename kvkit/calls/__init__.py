"""Turn checked calls into launches, which are prepared once and run again for arrays at other addresses."""
