"""From checked calls to launches: calls are prepared once and run again at other addresses."""
