"""From the arrays of a call to its launches, and back."""
