"""Check calls, copy their arrays to the device if needed, and run their launches."""
